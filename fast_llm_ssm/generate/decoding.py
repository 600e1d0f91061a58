"""Continuing a fixed set of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from fast_llm_ssm.generate.engine import Engine
from fast_llm_ssm.generate.request import Request, Token
from fast_llm_ssm.generate.sampling import SamplingOptions
from fast_llm_ssm.model import HybridModel

_MOST_SLOTS = 64


def generate(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Continue prompts; equal prompts have equal continuations.

    Args:
        model: in evaluation or training mode alike.
        prompts: token ids, at least one each.
        max_new_tokens: at most so many of each row.
        options: greedy if None.
        stop_ids: a row ends after drawing one of these.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: an empty prompt, or ids outside the vocabulary.
    """
    if not prompts:
        return []
    # On a GPU too without graphs: capturing them takes longer than a few prompts.
    engine = Engine(
        model,
        slots=min(len(prompts), _MOST_SLOTS),
        max_length=max(map(len, prompts)) + max_new_tokens,
        graphs=False,
    )
    rows: list[list[int]] = [[] for _ in prompts]
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):

        def take(token: Token, row: list[int] = row) -> None:
            row.append(token.id)

        try:
            engine.submit(Request(prompt, max_new_tokens, options or SamplingOptions(), stop_ids), take)
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from None
    while engine.busy:
        engine.step()
    return rows
