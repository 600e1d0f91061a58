"""Batches of training rows by their number, and the rows held out for validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fast_llm_ssm.config import UserError

from .batch import Batch, make_batch
from .config import DataConfig
from .documents import TOKENIZER_FOLDER, Documents
from .rows import Mix, Row, Stream
from .sources import SourceConfig, TokensSource
from .tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Dataset:
    """Training rows by number: row i is the same whoever asks, and whatever was asked before.

    Attributes:
        streams: The rows of each source.
        validation_streams: The validation rows of each source.
        mix: Which source gives which row.
        parts: What the rows depend on, by configuration key.
    """

    config: DataConfig
    tokenizer: Tokenizer
    streams: tuple[Stream, ...]
    validation_streams: tuple[Stream, ...]
    mix: Mix
    parts: dict[str, str]

    @property
    def num_tokens(self) -> int:
        """Tokens of all training documents, each counted once."""
        return sum(stream.num_tokens for stream in self.streams)

    def row(self, index: int) -> Row:
        """Row `index` (from 0, without end)."""
        source, number = self.mix.locate(index)
        return self.streams[source].row(number)

    def batch(self, first: int, count: int) -> Batch:
        """Rows `first` to `first + count - 1` as a batch."""
        return make_batch([self.row(index) for index in range(first, first + count)])

    def validation(self, batch_size: int = 8) -> Iterator[Batch]:
        """The validation rows, the same every time; the last batch may be smaller.

        Args:
            batch_size: Rows of a batch.
        """
        turns = sorted(
            (number, source)
            for source, stream in enumerate(self.validation_streams)
            for number in range(stream.num_rows)
        )
        turns = turns[: self.config.validation.max_rows] if self.config.validation else []
        for first in range(0, len(turns), batch_size):
            rows = [self.validation_streams[source].row(number) for number, source in turns[first : first + batch_size]]
            yield make_batch(rows)

    def fingerprint(self) -> str:
        """A hash that differs when some row differs."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:32]

    def epochs(self, rows: int) -> list[float]:
        """How often each source has been seen after this many rows."""
        return [self.mix.count(source, rows) / stream.num_rows for source, stream in enumerate(self.streams)]

    def summary(self) -> list[str]:
        """A line for each source, and one for the validation: documents, tokens, share."""
        total = sum(self.mix.quotas)
        lines = [
            f"{source.type} {_size(stream)} {quota / total:.1%} of the rows"
            for source, stream, quota in zip(self.config.sources, self.streams, self.mix.quotas, strict=True)
        ]
        if self.validation_streams:
            lines.append("validation " + ", ".join(_size(stream) for stream in self.validation_streams))
        return lines


def _size(stream: Stream) -> str:
    return f"{len(stream.selected):,} documents, {stream.num_tokens:,} tokens"


def build_dataset(config: DataConfig, seed: int) -> Dataset:
    """Opens or tokenizes the sources.

    Args:
        config: The `data:` section.
        seed: Of the run; decides the order of the training rows.

    Raises:
        UserError: A source cannot be read, is empty or too small; names its key.
    """
    tokenizer = _load_tokenizer(config)
    fraction = config.validation.fraction if config.validation is not None else None
    parts = {
        "seed": str(seed),
        "data.tokenizer": tokenizer.fingerprint(),
        "data.sequence_length": str(config.sequence_length),
        "data.packing": str(config.packing),
        "data.shuffle": str(config.shuffle),
        "data.validation.fraction": str(fraction),
    }
    cut = partial(Stream, sequence_length=config.sequence_length, packing=config.packing)
    streams, validation_streams = [], []
    for index, source in enumerate(config.sources):
        key = f"data.sources.{index}"
        documents = _load_source(source, key, tokenizer, config.cache)
        parts[key], parts[f"{key}.weight"] = documents.digest, str(float(source.weight))
        held = _held_out(documents, fraction)
        stream = cut(documents, np.flatnonzero(~held), seed=f"{seed} {index}", shuffle=config.shuffle)
        if stream.num_tokens <= (config.sequence_length if config.packing else 0):
            raise UserError(
                f"{key}: {_size(stream)} for training, expected more than one row of data.sequence_length "
                f"({config.sequence_length:,})"
            )
        streams.append(stream)
        if held.any():
            validation_streams.append(cut(documents, np.flatnonzero(held), seed=f"validation {index}"))
    for index, source in enumerate(config.validation.sources if config.validation is not None else ()):
        documents = _load_source(source, f"data.validation.sources.{index}", tokenizer, config.cache)
        validation_streams.append(cut(documents, np.arange(len(documents)), seed=f"validation {index}"))
    if config.validation is not None and not validation_streams:
        total = sum(len(stream.selected) for stream in streams)
        raise UserError(
            f"data.validation.fraction: {fraction} holds out no document of the {total:,}, "
            "expected a larger fraction, more documents (`split`), or data.validation.sources"
        )
    mix = Mix([source.weight for source in config.sources])
    return Dataset(config, tokenizer, tuple(streams), tuple(validation_streams), mix, parts)


def _load_tokenizer(config: DataConfig) -> Tokenizer:
    try:
        if config.tokenizer is not None:
            return config.tokenizer.load()
        prepared = next(source for source in config.sources if isinstance(source, TokensSource))
        return load_tokenizer(prepared.path / TOKENIZER_FOLDER)
    except UserError as error:
        raise UserError(f"data.tokenizer: {error}") from error


def _load_source(source: SourceConfig, key: str, tokenizer: Tokenizer, cache: Path | None) -> Documents:
    try:
        documents = source.load(tokenizer, cache)
    except (UserError, OSError) as error:
        raise UserError(f"{key}: {error}") from error
    if not len(documents):
        raise UserError(f"{key}: holds no text; expected at least one document that is not empty")
    return documents


def _held_out(documents: Documents, fraction: float | None) -> np.ndarray:
    """Which documents belong to the validation, [documents] bool."""
    if fraction is None:
        return np.zeros(len(documents), dtype=bool)
    return documents.table["hash"] < np.uint64(int(fraction * 2**64))


def changed_parts(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The configuration keys under which two `Dataset.parts` differ, sorted."""
    return sorted(key for key in saved.keys() | current.keys() if saved.get(key) != current.get(key))
