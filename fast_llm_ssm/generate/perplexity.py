"""How well a model predicts a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fast_llm_ssm.model import HybridModel


@dataclass(frozen=True)
class Score:
    """Result over a text: targets predicted, and their negative log-likelihood in nats."""

    num_targets: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.num_targets

    @property
    def perplexity(self) -> float:
        """Infinite rather than an error where it overflows."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    def bits_per_byte(self, num_bytes: int) -> float:
        """Over the bytes that the targets stand for."""
        return self.nats / math.log(2) / num_bytes


@torch.no_grad()
def score(
    model: HybridModel,
    ids: Sequence[int],
    sequence_length: int,
    stride: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """Predict every token but the first from those before it, in windows that overlap.

    Args:
        model: in no particular mode.
        ids: at least two.
        sequence_length: tokens that a window reads.
        stride: tokens by which windows advance: each target but those of the first window has at least
            `sequence_length - stride` tokens of context.
        progress: called with the number of targets done, window by window.

    Raises:
        ValueError: fewer than two ids, or a stride out of range.
    """
    if len(ids) < 2:
        raise ValueError(f"text: got {len(ids)} tokens, expected at least 2")
    if not 1 <= stride <= sequence_length:
        raise ValueError(f"stride: got {stride}, expected 1 to sequence_length ({sequence_length})")
    tokens = torch.tensor(ids, device=model.embedding.weight.device)
    nats, done = 0.0, 0
    while done < len(ids) - 1:
        # The targets from ids[done + 1] on are new; the window ends where it is full, or the text does.
        stop = min(done + (sequence_length if done == 0 else stride), len(ids) - 1)
        start = max(0, stop - sequence_length)
        targets = tokens[start + 1 : stop + 1].clone()
        targets[: done - start] = -100
        nats += float(model.loss(tokens[None, start:stop], targets[None], reduction="sum"))
        done = stop
        progress(done)
    return Score(len(ids) - 1, nats)
