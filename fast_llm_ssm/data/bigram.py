"""The bigram model that a language model has to beat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .batch import Batch
from .dataset import Dataset
from .rows import IGNORE_INDEX, Stream


@dataclass(frozen=True)
class Bigram:
    """A bigram model's loss.

    Attributes:
        loss: Cross-entropy on the validation targets, nats a token.
        train_tokens: Tokens it was estimated on.
        num_targets: Targets it was measured on.
    """

    loss: float
    train_tokens: int
    num_targets: int


def bigram_baseline(dataset: Dataset, max_tokens: int = 1 << 25) -> Bigram | None:
    """Estimates a bigram model on the training documents and measures it on exactly the validation targets.

    Witten-Bell smoothing (Witten, Bell 1991): p(b|a) = (c(a,b) + t(a) p(b)) / (c(a) + t(a)), where t(a) counts the
    different tokens seen after a, and p(b) = (c(b) + 1) / (n + vocab_size).

    Args:
        dataset: Training and validation data.
        max_tokens: Training tokens to use at most, the first of each source's shuffled documents.

    Returns:
        The loss; None where there is no validation.
    """
    batches = list(dataset.validation())
    if not batches:
        return None
    limit = max_tokens // len(dataset.streams)
    vocab_size = dataset.tokenizer.vocab_size
    pairs = np.concatenate([_pairs(stream, limit, vocab_size) for stream in dataset.streams])
    first, second = pairs // vocab_size, pairs % vocab_size
    unique, counts = np.unique(pairs, return_counts=True)
    after = np.bincount(first, minlength=vocab_size)  # c(a)
    kinds = np.bincount(unique // vocab_size, minlength=vocab_size)  # t(a)
    unigram = (np.bincount(second, minlength=vocab_size) + 1) / (len(pairs) + vocab_size)

    a, b = _evaluated(batches)
    key = a * vocab_size + b
    place = np.minimum(np.searchsorted(unique, key), len(unique) - 1)
    count = np.where(unique[place] == key, counts[place], 0)
    seen = np.maximum(after[a] + kinds[a], 1)
    probability = np.where(after[a] > 0, (count + kinds[a] * unigram[b]) / seen, unigram[b])
    return Bigram(float(-np.log(probability).mean()), len(pairs), len(a))


def _pairs(stream: Stream, limit: int, vocab_size: int) -> np.ndarray:
    """a * vocab_size + b of neighbours a, b inside the training documents, [pairs] int64."""
    order = stream.ordered_documents()
    lengths = stream.documents.lengths()[order]
    order = order[: max(1, int(np.searchsorted(np.cumsum(lengths), limit, side="right")))]
    pieces = []
    for index in order.tolist():
        document = stream.documents[index][:limit].astype(np.int64)
        pieces.append(document[:-1] * vocab_size + document[1:])
    return np.concatenate(pieces)


def _evaluated(batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, [num_targets] int64 each, where there is a target."""
    tokens = np.concatenate([batch.tokens.numpy().ravel() for batch in batches])
    targets = np.concatenate([batch.targets.numpy().ravel() for batch in batches])
    kept = targets != IGNORE_INDEX
    return tokens[kept], targets[kept]
