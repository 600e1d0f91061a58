"""Tokenized documents, in memory or in a prepared folder that is read by memory mapping.

A prepared folder holds:
    tokens.bin     the ids of all documents, one after the other, uint16 or uint32, little-endian
    documents.bin  one record a document: where it ends in tokens.bin (tokens) and the hash of its text
    meta.json      counts, tokenizer, sizes and checksums; without it the folder is not complete
    tokenizer/     the tokenizer that made it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fast_llm_ssm.config import Config, UserError

TOKENS_FILE = "tokens.bin"
TABLE_FILE = "documents.bin"
META_FILE = "meta.json"
TOKENIZER_FOLDER = "tokenizer"
TABLE_DTYPE = np.dtype([("end", "<u8"), ("hash", "<u8")])


class FileEntry(Config):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


class Meta(Config):
    """What meta.json holds."""

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    num_documents: int
    num_tokens: int
    vocab_size: int
    tokenizer: str
    sources: list[dict[str, Any]]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Documents:
    """Tokenized documents.

    Attributes:
        tokens: [num_tokens] uint16 or uint32; every document with its bos and eos.
        table: [num_documents] records of `TABLE_DTYPE`.
        digest: Hash of the content.
    """

    tokens: np.ndarray
    table: np.ndarray
    digest: str

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(self.table["end"][index - 1]) if index else 0
        return self.tokens[start : int(self.table["end"][index])]

    def lengths(self) -> np.ndarray:
        """Tokens of each document, [num_documents] int64."""
        return np.diff(self.table["end"].astype(np.int64), prepend=0)


def hash_text(text: str) -> int:
    """The 64-bit hash by which documents are told apart and held out; the same under every tokenizer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def make_table(ends: Iterable[int], hashes: Iterable[int]) -> np.ndarray:
    """The records of some documents, [documents] of `TABLE_DTYPE`."""
    return np.array(list(zip(ends, hashes, strict=True)), dtype=TABLE_DTYPE)


def collect(encoded: Iterable[tuple[np.ndarray, int]], dtype: np.dtype) -> Documents:
    """Documents in memory.

    Args:
        encoded: The ids and the text's hash of each document.
        dtype: Type of the ids.
    """
    pieces: list[np.ndarray] = []
    hashes: list[int] = []
    for ids, text_hash in encoded:
        pieces.append(ids)
        hashes.append(text_hash)
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)
    table = make_table(np.cumsum([len(ids) for ids in pieces], dtype=np.int64).tolist(), hashes)
    return Documents(
        tokens, table, _digest(hashlib.sha256(tokens.data).hexdigest(), hashlib.sha256(table.data).hexdigest())
    )


def file_entry(path: Path) -> FileEntry:
    """Reads a file to its end for its size and checksum."""
    with path.open("rb") as file:
        return FileEntry(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def read_meta(folder: Path) -> Meta:
    """The meta.json of a prepared folder.

    Raises:
        UserError: The folder is missing or not complete, or its meta.json is damaged.
    """
    path = folder / META_FILE
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}, expected one that `fast-llm prepare` wrote")
    if not path.is_file():
        raise UserError(f"no {META_FILE} in {folder}, expected a complete folder; run `fast-llm prepare`")
    try:
        meta = Meta.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged or of another version; prepare the folder again") from error
    if set(meta.files) != {TOKENS_FILE, TABLE_FILE}:
        raise UserError(f"{path} is damaged, it does not list both files; prepare the folder again")
    return meta


def read_prepared(folder: Path, verify: bool = True) -> Documents:
    """Opens a prepared folder by memory mapping.

    Args:
        folder: Written by `fast-llm prepare`.
        verify: Read tokens.bin once and compare its checksum; its size is always compared.

    Raises:
        UserError: The folder is not complete, or a file is damaged; names the file.
    """
    meta = read_meta(folder)
    for name, expected in meta.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing; prepare the folder again")
        if (size := path.stat().st_size) != expected.size:
            raise UserError(f"{path} has {size:,} bytes, expected {expected.size:,}; prepare the folder again")
        if (verify or name == TABLE_FILE) and file_entry(path) != expected:
            raise UserError(
                f"{path} is damaged, its checksum differs from the one in {META_FILE}; prepare the folder again"
            )
    tokens = np.memmap(folder / TOKENS_FILE, dtype=np.dtype(meta.dtype).newbyteorder("<"), mode="r")
    table = np.memmap(folder / TABLE_FILE, dtype=TABLE_DTYPE, mode="r")
    if (len(table), len(tokens)) != (meta.num_documents, meta.num_tokens) or table["end"][-1] != len(tokens):
        raise UserError(f"{folder / META_FILE} is damaged, its counts differ from the files'; prepare the folder again")
    return Documents(tokens, table, _digest(meta.files[TOKENS_FILE].sha256, meta.files[TABLE_FILE].sha256))


def _digest(tokens: str, table: str) -> str:
    return hashlib.sha256(f"{tokens} {table}".encode()).hexdigest()[:32]
