"""What is asked of the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from fast_llm_ssm.generate.sampling import SamplingOptions

FinishReason = Literal["length", "stop_token", "stop_string"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at most so many more.
        options: greedy by default.
        stop_ids: the request ends with one of these tokens, which is given out last.
        stop: the request ends when its text holds one of these strings; they are not part of the text. Needs an
            engine with a tokenizer.
        log_probs: also give each token's log-probability.
        top_log_probs: and those of so many of the likeliest tokens.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    options: SamplingOptions = SamplingOptions()
    stop_ids: Collection[int] = ()
    stop: Sequence[str] = ()
    log_probs: bool = False
    top_log_probs: int = 0


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        id: of the vocabulary.
        text: what the tokens up to this one add to the text given out so far; "" without a tokenizer.
        finish: why this is the last token; None if it is not.
        log_prob: natural logarithm of its probability by the model alone; None unless asked for.
        top: (id, log-probability) of the likeliest tokens in its place, likeliest first.
    """

    id: int
    text: str
    finish: FinishReason | None
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
