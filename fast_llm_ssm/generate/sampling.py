"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingOptions:
    """How a next token is drawn.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: draw from the k likeliest tokens only; None or 0 for all.
        top_p: draw from the fewest tokens whose probabilities sum to p (nucleus sampling, arXiv 1904.09751).
        seed: of the draws.

    Raises:
        ValueError: a value out of range, named.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature: got {self.temperature}, expected a number of at least 0")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, expected a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected a number above 0 and at most 1")


def sample(logits: Tensor, options: SamplingOptions, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token a row.

    Args:
        logits: [B, V].
        options: temperature, top-k, top-p.
        generator: of the draws, on the logits' device.

    Returns:
        [B] int64.
    """
    if options.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / options.temperature
    if options.top_k and options.top_k < logits.shape[-1]:
        smallest = logits.topk(options.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if options.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # A token stays if those before it have not reached p yet: the first always stays.
        drop = probabilities.cumsum(-1) - probabilities >= options.top_p
        logits = torch.full_like(logits, -torch.inf).scatter(-1, index, ordered.masked_fill(drop, -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
