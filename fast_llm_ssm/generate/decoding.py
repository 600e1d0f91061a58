"""Continuing prompts with the recurrent state: prefill once, then one step a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fast_llm_ssm.generate.sampling import SamplingOptions, sample
from fast_llm_ssm.model import DecodingState, HybridModel

_PREFILL_TOKENS = 8192
"""Tokens of a prompt taken at a time, over all rows: bounds the memory of a prefill."""


@torch.no_grad()
def decode(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
) -> Iterator[list[int | None]]:
    """Continue prompts, token by token.

    Args:
        model: in evaluation or training mode alike.
        prompts: token ids, at least one each.
        max_new_tokens: at most so many of each row.
        options: greedy if None.
        stop_ids: a row ends after drawing one of these.

    Yields:
        The next token of each row; None for rows that have ended.

    Raises:
        ValueError: an empty prompt, or ids outside the vocabulary.
    """
    options = options or SamplingOptions()
    vocab_size = model.config.vocab_size
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty, expected at least one token")
        if bad := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"prompt {i} holds token {bad[0]}, expected ids below {vocab_size}")
    device = model.embedding.weight.device
    state = model.new_state(len(prompts), max(map(len, prompts)) + max_new_tokens)
    logits = _prefill(model, prompts, state)
    generator = torch.Generator(device).manual_seed(options.seed)
    running = [True] * len(prompts)
    for i in range(max_new_tokens):
        tokens = sample(logits[:, :vocab_size], options, generator)  # padded rows of the vocabulary are no tokens
        drawn = tokens.tolist()
        yield [token if alive else None for token, alive in zip(drawn, running, strict=True)]
        running = [alive and token not in stop_ids for token, alive in zip(drawn, running, strict=True)]
        if not any(running) or i + 1 == max_new_tokens:
            return
        logits = model.step(tokens, state)


def generate(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
) -> list[list[int]]:
    """All new tokens of each prompt; see `decode`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in decode(model, prompts, max_new_tokens, options, stop_ids):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def _prefill(model: HybridModel, prompts: Sequence[Sequence[int]], state: DecodingState) -> Tensor:
    """Logits after each prompt: [B, rows of the vocabulary]."""
    device = state.lengths.device
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        mask[row, : len(prompt)] = 1
    piece = max(1, _PREFILL_TOKENS // len(prompts))
    logits: Tensor | None = None
    for start in range(0, longest, piece):
        part = mask[:, start : start + piece]
        new = model.prefill(ids[:, start : start + piece], state, part)
        # A prompt that ended in an earlier piece keeps the logits it had.
        logits = new if logits is None else torch.where(part.any(1, keepdim=True), new, logits)
    assert logits is not None
    return logits
