"""Tokenizers behind one small interface: raw bytes, and Hugging Face tokenizer folders."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fast_llm_ssm.config import UserError

_BYTES_FILE = "byte_tokenizer.json"


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: One more than the largest id.
        bos_id: The id that opens a document, None where documents have no opening id.
        eos_id: The id that closes a document, None where the tokenizer has none.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without bos and eos."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bos and eos are left out, an unfinished character becomes U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer` needs into the folder, which is created."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that differs when the ids of some text differ."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` over several texts: one array of `token_dtype` each."""
        return [np.array(self.encode(text), dtype=self.token_dtype) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the text as the beginning of a document: bos, where there is one, and the text."""
        return [*self._opening, *self.encode(text)]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of whole documents, each with its bos, where there is one, and eos.

        Returns:
            One array of `token_dtype` a text.

        Raises:
            UserError: The tokenizer has no eos.
        """
        if self.eos_id is None:
            raise UserError("the tokenizer has no eos_token; expected one, as it ends every training document")
        opening = np.array(self._opening, dtype=self.token_dtype)
        eos = np.array([self.eos_id], dtype=self.token_dtype)
        return [np.concatenate([opening, ids, eos]) for ids in self.encode_batch(texts)]

    @property
    def token_dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32, little-endian, that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def _opening(self) -> list[int]:
        return [] if self.bos_id is None else [self.bos_id]


class ByteTokenizer(Tokenizer):
    """The 256 values of a byte of UTF-8, then bos (256) and eos (257)."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.token_dtype) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _BYTES_FILE).write_text(json.dumps({"type": "bytes", "vocab_size": self.vocab_size}) + "\n")

    def fingerprint(self) -> str:
        return "bytes-1"


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer folder as transformers writes it; local files only, and never code from the folder.

    Args:
        folder: Holds tokenizer.json or the older vocabulary files, and tokenizer_config.json.

    Raises:
        UserError: The folder is missing, or transformers cannot read a tokenizer from it.
    """

    def __init__(self, folder: Path) -> None:
        check_tokenizer_folder(folder)
        from transformers import AutoTokenizer  # slow to import

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            vocabulary = self._tokenizer.get_vocab()
        except Exception as error:  # whatever transformers raises on a damaged folder
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"cannot read the tokenizer in {folder} ({type(error).__name__}: {reason})") from error
        if not vocabulary:
            raise UserError(f"the tokenizer in {folder} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = self._tokenizer.eos_token_id
        bos = self._tokenizer.bos_token_id
        # A bos counts only where the tokenizer itself puts it before a text.
        self.bos_id = bos if bos is not None and self._tokenizer("a")["input_ids"][:1] == [bos] else None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        batch = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(ids, dtype=self.token_dtype) for ids in batch]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def fingerprint(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        digest = hashlib.sha256(json.dumps([content, self.bos_id, self.eos_id]).encode())
        return f"huggingface-{digest.hexdigest()[:32]}"


def check_tokenizer_folder(folder: Path) -> None:
    """Raises a UserError where the folder does not look like a Hugging Face tokenizer's; quick, as it loads nothing.

    Args:
        folder: The folder to look into.
    """
    if not folder.exists():
        raise UserError(f"no such folder: {folder}, expected one with tokenizer.json or tokenizer.model")
    if not folder.is_dir():
        raise UserError(f"got the file {folder}, expected the folder that holds it")
    names = {file.name for file in folder.iterdir()}
    known = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"}
    if not names & known:
        raise UserError(f"no tokenizer in {folder}, expected one of {', '.join(sorted(known))}")
    for file in (folder / name for name in ("tokenizer.json", "tokenizer_config.json") if name in names):
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {file}: {error}, expected JSON") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads a tokenizer that `Tokenizer.save` or transformers wrote.

    Args:
        folder: The tokenizer's folder.

    Returns:
        The tokenizer.

    Raises:
        UserError: The folder is missing or holds no readable tokenizer.
    """
    if (folder / _BYTES_FILE).is_file():
        return ByteTokenizer()
    return HuggingFaceTokenizer(folder)
