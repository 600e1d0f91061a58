"""Text documents to token ids: into memory, or into a prepared folder that survives being killed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fast_llm_ssm.config import UserError

from .documents import (
    META_FILE,
    TABLE_DTYPE,
    TABLE_FILE,
    TOKENIZER_FOLDER,
    TOKENS_FILE,
    Documents,
    Meta,
    collect,
    file_entry,
    hash_text,
    make_table,
    read_meta,
    read_prepared,
)
from .tokenizer import Tokenizer

_PROGRESS_FILE = "progress.json"
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


class Document(NamedTuple):
    """A text and how far its source has been read.

    Attributes:
        text: The document.
        position: Bytes of the source read so far, for the progress bar.
    """

    text: str
    position: int = 0


class Progress(NamedTuple):
    """How far a preparation has come, in documents, tokens and bytes of the sources."""

    documents: int
    tokens: int
    position: int


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Documents:
    """Tokenizes documents into memory; empty ones are left out."""
    batches = _batches(documents, tokenizer)
    return collect((entry for batch, _ in batches for entry in batch), tokenizer.token_dtype)


def prepare(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    sources: list[dict[str, Any]],
    on_progress: Callable[[Progress], None] | None = None,
    flush_tokens: int = 1 << 20,
) -> Documents:
    """Writes a prepared folder; called again after a kill it goes on, and the result has the same bytes.

    The work happens in `FOLDER.partial`, which becomes `FOLDER` when it is complete. A second process waits.

    Args:
        documents: The same documents in the same order in every attempt; empty ones are left out.
        tokenizer: Makes the ids; a copy is kept in the folder.
        folder: The result.
        sources: Where the documents come from; kept in meta.json, and must not change between attempts.
        on_progress: Told now and then how far it is.
        flush_tokens: Tokens between two points that a later attempt goes on from.

    Returns:
        The opened folder.

    Raises:
        UserError: The folder holds something else, there are no documents, or they changed between two attempts.
    """
    sources = json.loads(json.dumps(sources))
    if _is_complete(folder, tokenizer, sources):
        prepared = read_prepared(folder)
        if next(_after(documents, prepared.table["hash"], folder), None) is not None:
            raise UserError(f"the sources have more documents than {folder}, remove it to begin again")
        return prepared
    partial = folder.with_name(folder.name + ".partial")
    with _lock(partial):
        if _is_complete(folder, tokenizer, sources):  # another process has finished it
            partial.rmdir()
        else:
            _write(documents, tokenizer, partial, sources, on_progress, flush_tokens)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
            _sync(folder.parent)
            (folder / _PROGRESS_FILE).unlink()
    return read_prepared(folder, verify=False)


def _is_complete(folder: Path, tokenizer: Tokenizer, sources: list[dict[str, Any]]) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / META_FILE).is_file():
        raise UserError(f"{folder} exists and is not a prepared folder, expected a new or an empty folder")
    meta = read_meta(folder)
    if (meta.tokenizer, meta.sources) != (tokenizer.fingerprint(), sources):
        raise UserError(f"{folder} was prepared from other sources or with another tokenizer, expected a new folder")
    (folder / _PROGRESS_FILE).unlink(missing_ok=True)
    return True


def _write(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    sources: list[dict[str, Any]],
    on_progress: Callable[[Progress], None] | None,
    flush_tokens: int,
) -> None:
    dtype, description = tokenizer.token_dtype, {"tokenizer": tokenizer.fingerprint(), "sources": sources}
    num_documents, num_tokens = _read_progress(folder, description)
    with (folder / TOKENS_FILE).open("ab") as tokens_file, (folder / TABLE_FILE).open("ab") as table_file:
        for file, size in (
            (tokens_file, num_tokens * dtype.itemsize),
            (table_file, num_documents * TABLE_DTYPE.itemsize),
        ):
            if file.tell() < size:
                raise UserError(f"{file.name} is shorter than {_PROGRESS_FILE} says, remove {folder} to begin again")
            file.truncate(size)
        table = np.fromfile(folder / TABLE_FILE, dtype=TABLE_DTYPE)
        flushed = num_tokens
        for batch, position in _batches(_after(documents, table["hash"], folder), tokenizer):
            lengths = [len(ids) for ids, _ in batch]
            tokens_file.write(np.concatenate([ids for ids, _ in batch]).tobytes())
            table_file.write(
                make_table((np.cumsum(lengths) + num_tokens).tolist(), [text_hash for _, text_hash in batch]).tobytes()
            )
            num_documents, num_tokens = num_documents + len(batch), num_tokens + sum(lengths)
            if num_tokens - flushed >= flush_tokens:
                flushed = num_tokens
                _flush(tokens_file, table_file)
                _write_progress(folder, description, num_documents, num_tokens)
            if on_progress is not None:
                on_progress(Progress(num_documents, num_tokens, position))
        if not num_documents:
            raise UserError(f"{folder}: the sources hold no text, expected at least one document that is not empty")
        _flush(tokens_file, table_file)
        _write_progress(folder, description, num_documents, num_tokens)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    meta = Meta(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_documents=num_documents,
        num_tokens=num_tokens,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint(),
        sources=sources,
        files={TOKENS_FILE: file_entry(folder / TOKENS_FILE), TABLE_FILE: file_entry(folder / TABLE_FILE)},
    )
    _replace(folder / META_FILE, meta.model_dump_json(indent=2) + "\n")


def _batches(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[tuple[np.ndarray, int]], int]]:
    """Yields (ids and text hash of some documents, position in the source); batches keep tokenizer threads busy."""
    texts: list[str] = []
    characters = position = 0

    def encode() -> tuple[list[tuple[np.ndarray, int]], int]:
        ids = tokenizer.encode_documents(texts)
        return list(zip(ids, map(hash_text, texts), strict=True)), position

    for document in documents:
        if not document.text:
            continue
        texts.append(document.text)
        characters, position = characters + len(document.text), document.position
        if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
            yield encode()
            texts, characters = [], 0
    if texts:
        yield encode()


def _after(documents: Iterable[Document], hashes: np.ndarray, folder: Path) -> Iterator[Document]:
    """The documents after those that the folder holds already, whose text hashes must be these."""
    remaining = (document for document in documents if document.text)
    for number, expected in enumerate(hashes.tolist(), start=1):
        document = next(remaining, None)
        if document is None or hash_text(document.text) != expected:
            raise UserError(
                f"document {number} of the sources differs from the one in {folder}, remove it to begin again"
            )
    yield from remaining


def _read_progress(folder: Path, description: dict[str, Any]) -> tuple[int, int]:
    """Documents and tokens done in an earlier attempt."""
    path = folder / _PROGRESS_FILE
    if not path.is_file():
        return 0, 0
    progress = json.loads(path.read_text())
    if progress["description"] != description:
        raise UserError(f"{folder} was begun from other sources or with another tokenizer, remove it to begin again")
    return progress["documents"], progress["tokens"]


def _write_progress(folder: Path, description: dict[str, Any], documents: int, tokens: int) -> None:
    progress = {"documents": documents, "tokens": tokens, "description": description}
    _replace(folder / _PROGRESS_FILE, json.dumps(progress))


def _replace(path: Path, text: str) -> None:
    """Writes a small file such that it is the old one or the new one at any moment."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        file.write(text)
        _flush(file)
    temporary.replace(path)
    _sync(path.parent)


def _flush(*files: Any) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it alone."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, folder):  # the former holder may have renamed it
                yield
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
