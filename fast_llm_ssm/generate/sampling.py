"""Choosing next tokens: every row by its own options, whatever the other rows are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

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
        repetition_penalty: divides the positive logits of tokens seen so far, prompt included, and multiplies the
            negative ones (CTRL, arXiv 1909.05858). 1 changes nothing.

    Raises:
        ValueError: a value out of range, named.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: got {self.temperature}, expected a number of at least 0")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, expected a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected a number above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty: got {self.repetition_penalty}, expected a number above 0")


@dataclass
class Draws:
    """One request's side of the sampling: its options, the tokens so far and its own random numbers."""

    options: SamplingOptions
    tokens: list[int]  # prompt included
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.options.seed)


class Sampler:
    """Draws a token for each of several requests at once. Built anew when the requests change.

    Args:
        rows: a request a row of the logits; draws take from their random numbers.
        vocab_size: ids from here on are padding of the embedding, never drawn.
        device: of the logits.
    """

    def __init__(self, rows: Sequence[Draws], vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._rows = rows
        options = [row.options for row in rows]
        drawn = [i for i, o in enumerate(options) if o.temperature > 0]
        penalised = [i for i, o in enumerate(options) if o.repetition_penalty != 1]

        def tensor(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._drawn = tensor(drawn, torch.int64)
        self._penalised = tensor(penalised, torch.int64)
        self._generators = [rows[i].random for i in drawn]
        self._temperature = tensor([options[i].temperature for i in drawn])[:, None].clamp(min=1e-6)  # 0 in fp32
        self._top_k = tensor([min(options[i].top_k or vocab_size, vocab_size) for i in drawn], torch.int64)[:, None]
        self._top_p = tensor([options[i].top_p for i in drawn])[:, None]
        self._penalty = tensor([options[i].repetition_penalty for i in penalised])[:, None]
        self._seen = torch.zeros(len(penalised), vocab_size, dtype=torch.bool, device=device)
        for j, i in enumerate(penalised):
            self._seen[j, tensor(rows[i].tokens, torch.int64)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, at least vocab_size] -> tokens [B] int64."""
        logits = logits[:, : self._vocab_size].float()
        if len(self._penalised):
            rows = logits[self._penalised]
            punished = torch.where(rows > 0, rows / self._penalty, rows * self._penalty)
            logits = logits.index_copy(0, self._penalised, torch.where(self._seen, punished, rows))
        tokens = logits.argmax(-1)
        if len(self._drawn):
            uniform = torch.tensor([g.random() for g in self._generators], device=logits.device)[:, None]
            tokens[self._drawn] = self._draw(logits[self._drawn], uniform)
        if len(self._penalised):
            self._seen.scatter_(1, tokens[self._penalised][:, None], True)
        return tokens

    def _draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Inverts the cumulative distribution over the likeliest tokens first."""
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        ordered = (ordered - ordered[:, :1]) / self._temperature
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        probabilities = ordered.masked_fill(rank >= self._top_k, -torch.inf).softmax(-1)
        # A token stays if those before it have not reached p yet: the first always stays.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill((before >= self._top_p) & (rank > 0), 0)
        total = probabilities.cumsum(-1)
        place = (total <= uniform * total[:, -1:]).sum(-1, keepdim=True)
        # Rounding may leave the last step unreached: then the last token that can be drawn.
        place = place.minimum((probabilities > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
        return index.gather(-1, place)[:, 0]


def log_probabilities(logits: Tensor, tokens: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What the model itself thinks of the drawn tokens, before temperature, penalties and cuts.

    Args:
        logits: [B, V].
        tokens: [B].
        top: how many of the likeliest tokens to name beside.

    Returns:
        Natural logarithms [B] of the tokens' probabilities, those [B, top] of the likeliest, and their ids [B, top].
    """
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.topk(top, dim=-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0], best.values, best.indices
