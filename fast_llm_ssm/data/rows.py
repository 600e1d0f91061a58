"""Which tokens make row i: pure functions of (seed, i), with no state to save.

An epoch of a source is all its documents, shuffled, one after the other, cut into rows of sequence_length tokens, and
the rows shuffled: neighbours in a batch come from different documents. Each row also reads the token behind its end, as
the last target; so an epoch shows each token once as an input, and once as a target if it has a predecessor in its
document. Only the last row of an epoch is padded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .documents import Documents

IGNORE_INDEX = -100
_MAX_CYCLE = 1 << 16


class Row(NamedTuple):
    """A row of training data.

    Attributes:
        tokens: [sequence_length] int64; an unfinished row is filled up with 0.
        targets: [sequence_length] int64: the next token where it is of the same document, else -100.
        ends: Where documents end inside the row, ascending; the last one is sequence_length.
    """

    tokens: np.ndarray
    targets: np.ndarray
    ends: list[int]


@dataclass(frozen=True)
class _Epoch:
    documents: np.ndarray  # [documents] in the order of this epoch
    ends: np.ndarray  # [documents] where each ends, in tokens (packed) or rows (not packed)
    rows: np.ndarray | None  # [rows] which one comes when; None is in order


class Stream:
    """Rows of some documents, epoch after epoch.

    Args:
        documents: The tokenized documents.
        selected: [n] indices of the documents to use.
        sequence_length: Tokens of a row.
        seed: Anything that repeats; its text seeds the shuffles.
        shuffle: Shuffle documents and rows anew in each epoch.
        packing: Fill rows with documents one after the other; else a row holds (a part of) one document.
    """

    def __init__(
        self,
        documents: Documents,
        selected: np.ndarray,
        sequence_length: int,
        seed: str,
        shuffle: bool = True,
        packing: bool = True,
    ) -> None:
        self.documents, self.selected = documents, selected
        self.sequence_length = sequence_length
        self.seed, self.shuffle, self.packing = seed, shuffle, packing
        self.lengths = documents.lengths()[selected]
        self.num_tokens = int(self.lengths.sum())
        # A token without a next one needs no row of its own.
        sizes = np.array([self.num_tokens]) if packing else self.lengths
        self.num_rows = int(np.maximum(1, -(-(sizes - 1) // sequence_length)).sum())
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def row(self, index: int) -> Row:
        """Row `index` of the endless stream; `num_rows` rows are an epoch."""
        number, position = divmod(index, self.num_rows)
        epoch = self._epoch(number)
        row = position if epoch.rows is None else int(epoch.rows[position])
        start = row * self.sequence_length if self.packing else row
        place = int(np.searchsorted(epoch.ends, start, side="right"))
        offset = start - (int(epoch.ends[place - 1]) if place else 0)
        return self._cut(epoch, place, offset if self.packing else offset * self.sequence_length)

    def ordered_documents(self, epoch: int = 0) -> np.ndarray:
        """Indices of the documents in the order of an epoch, [n]."""
        return self._epoch(epoch).documents

    def _cut(self, epoch: _Epoch, place: int, offset: int) -> Row:
        """The row that begins `offset` tokens into the epoch's document number `place`."""
        length = self.sequence_length
        stretch = np.zeros(length + 1, dtype=np.int64)
        filled, ends = 0, []
        while filled <= length and place < len(epoch.documents):
            document = self.documents[int(epoch.documents[place])]
            piece = document[offset : offset + length + 1 - filled]
            stretch[filled : filled + len(piece)] = piece
            filled += len(piece)
            if offset + len(piece) == len(document) and filled <= length:
                ends.append(filled)
            if not self.packing:
                break
            place, offset = place + 1, 0
        targets = stretch[1:].copy()
        targets[np.array(ends, dtype=np.int64) - 1] = IGNORE_INDEX
        targets[filled:] = IGNORE_INDEX
        if not ends or ends[-1] != length:
            ends.append(length)
        return Row(stretch[:-1], targets, ends)

    def _make_epoch(self, number: int) -> _Epoch:
        order = permutation(len(self.selected), f"documents {self.seed} {number}") if self.shuffle else slice(None)
        lengths = self.lengths[order]
        sizes = lengths if self.packing else np.maximum(1, -(-(lengths - 1) // self.sequence_length))
        rows = permutation(self.num_rows, f"rows {self.seed} {number}") if self.shuffle else None
        return _Epoch(self.selected[order], np.cumsum(sizes), rows)


class Mix:
    """Which source gives row i, in exact proportion to the weights.

    The sources take turns in a cycle that repeats: for weights 2 and 1 it is 3 rows long. Weights without a small
    common denominator are rounded to a cycle of 65,536 rows.

    Args:
        weights: One positive number a source.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = _quotas(weights)  # rows of each source in a cycle
        source = np.repeat(np.arange(len(weights)), self.quotas)
        turn = np.concatenate([np.arange(quota) for quota in self.quotas])
        order = np.lexsort((source, (turn + 0.5) / np.array(self.quotas)[source]))  # each source's turns evenly spread
        self._source, self._turn = source[order], turn[order]

    def locate(self, index: int) -> tuple[int, int]:
        """The source of row `index`, and which row of that source it is."""
        cycle, place = divmod(index, len(self._source))
        source = int(self._source[place])
        return source, cycle * self.quotas[source] + int(self._turn[place])

    def count(self, source: int, index: int) -> int:
        """How many of the rows before `index` are of this source."""
        cycle, place = divmod(index, len(self._source))
        return cycle * self.quotas[source] + int((self._source[:place] == source).sum())


def _quotas(weights: Sequence[float]) -> list[int]:
    shares = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    quotas = [int(share * scale) for share in shares]
    divisor = math.gcd(*quotas)
    if sum(quotas) // divisor <= _MAX_CYCLE:
        return [quota // divisor for quota in quotas]
    return [max(1, round(share / sum(shares) * _MAX_CYCLE)) for share in shares]


def permutation(count: int, seed: str) -> np.ndarray:
    """A permutation of range(count), [count] int64, that depends on nothing but its arguments.

    Sorts by the splitmix64 hash (Steele, Lea, Flood 2014) of seed + index, as NumPy's own shuffles may change between
    versions.
    """
    base = np.frombuffer(hashlib.blake2b(seed.encode(), digest_size=8).digest(), dtype="<u8")
    with np.errstate(over="ignore"):
        z = base + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")
