"""How fast a model reads prompts and generates."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

from fast_llm_ssm.generate.engine import Engine
from fast_llm_ssm.generate.request import Request, Token
from fast_llm_ssm.model import HybridModel


@dataclass(frozen=True)
class Speed:
    """Medians over the repeats; seconds.

    Attributes:
        batch_size: requests at once.
        prompt_length: tokens of each prompt.
        new_tokens: tokens generated for each.
        first_token: from the start until every request has its first token.
        decode: of all further rounds together.
        state_bytes: memory of the decoding state.
    """

    batch_size: int
    prompt_length: int
    new_tokens: int
    first_token: float
    decode: float
    state_bytes: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.batch_size * self.prompt_length / self.first_token

    @property
    def decode_rate(self) -> float:
        """New tokens a second, of all requests."""
        return self.batch_size * (self.new_tokens - 1) / self.decode

    @property
    def step(self) -> float:
        """One decoding round."""
        return self.decode / (self.new_tokens - 1)


def measure(
    model: HybridModel,
    batch_size: int,
    prompt_length: int,
    new_tokens: int,
    repeats: int = 3,
    prefill_tokens: int = 8192,
    graphs: bool = True,
) -> Speed:
    """Time greedy generation from random prompts, once to warm up and then `repeats` times.

    Args:
        model: to measure.
        batch_size: requests at once.
        prompt_length: tokens of each prompt.
        new_tokens: tokens for each, at least 2.
        repeats: medians are taken over so many runs.
        prefill_tokens: prompt tokens read in one round.
        graphs: step through CUDA graphs, on a GPU.
    """
    engine = Engine(
        model,
        slots=batch_size,
        max_length=prompt_length + new_tokens,
        prefill_tokens=prefill_tokens,
        graphs=graphs,
    )
    draw = random.Random(0)
    vocab_size = model.config.vocab_size
    times = []
    for _ in range(repeats + 1):
        prompts = [[draw.randrange(vocab_size) for _ in range(prompt_length)] for _ in range(batch_size)]
        times.append(_once(engine, prompts, new_tokens))
    first, total = (sorted(values)[repeats // 2] for values in zip(*times[1:], strict=True))
    return Speed(batch_size, prompt_length, new_tokens, first, total, engine.state.num_bytes)


def _once(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """(seconds until all requests have a token, seconds of the rounds in which all take part)."""
    counts = [0] * len(prompts)

    for i, prompt in enumerate(prompts):

        def count(token: Token, i: int = i) -> None:
            counts[i] += 1

        engine.submit(Request(prompt, new_tokens), count)
    began = _now(engine)
    while not all(counts):
        engine.step()
    read = _now(engine)
    before = sum(counts)
    while engine.busy:
        engine.step()
    elapsed = _now(engine) - read
    # Requests whose prompts were read first have drawn some tokens already: as long as if none had.
    return read - began, elapsed * len(prompts) * (new_tokens - 1) / max(sum(counts) - before, 1)


def _now(engine: Engine) -> float:
    if engine.state.lengths.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
