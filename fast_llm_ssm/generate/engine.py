"""Continuous batching: requests come and go while others are being continued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fast_llm_ssm.data.tokenizer import Tokenizer
from fast_llm_ssm.generate.request import FinishReason, Request, Token
from fast_llm_ssm.generate.sampling import Draws, Sampler, log_probabilities
from fast_llm_ssm.generate.step import DecodeStep, state_rows
from fast_llm_ssm.generate.text import TextStream
from fast_llm_ssm.model import DecodingState, HybridModel


class Job:
    """A request in the engine.

    Args:
        request: what is asked for.
        emit: called with each token as it is drawn, in the thread that runs the engine.
        tokenizer: None if only tokens matter.
    """

    def __init__(self, request: Request, emit: Callable[[Token], None], tokenizer: Tokenizer | None):
        self.request = request
        self.emit = emit
        self.cancelled = False
        self.tokens = list(request.prompt)
        self.draws = Draws(request.options, self.tokens)
        self._text = TextStream(tokenizer, request.prompt, request.stop) if tokenizer is not None else None

    def cancel(self) -> None:
        """Give it up: no token comes after the one that is being worked on. From any thread."""
        self.cancelled = True

    def take(self, token: int, log_prob: float | None = None, top: Sequence[tuple[int, float]] = ()) -> bool:
        """Give a token out. Returns whether it was the last."""
        self.tokens.append(token)
        text, finish = self._advance(token)
        self.emit(Token(token, text, finish, log_prob, tuple(top)))
        return finish is not None

    def _advance(self, token: int) -> tuple[str, FinishReason | None]:
        finish: FinishReason | None = None
        if token in self.request.stop_ids:
            finish = "stop_token"
        elif len(self.tokens) - len(self.request.prompt) >= self.request.max_new_tokens:
            finish = "length"
        if self._text is None:
            return "", finish
        text = "" if finish == "stop_token" else self._text.push(token)
        if finish is not None:
            text += self._text.finish()
        return text, "stop_string" if self._text.stopped else finish


class Engine:
    """Continues many requests at once: each in a slot of a decoding state of fixed size, freed when it ends.

    In each round some prompt tokens are read, of requests that wait for a slot, and every request in a slot gets one
    token. On the CPU a request gives the same tokens alone and in any company, to the last bit of the logits: prompts
    are read one by one, and steps have a fixed size (see `step.GROUP`; mixers should have an even number of heads, as
    PyTorch rounds the last elements of a tensor in another way if they don't fill a vector). Not thread-safe: one
    thread runs it.

    Args:
        model: left as it is.
        slots: requests at once.
        max_length: tokens of a request, prompt and continuation together.
        prefill_tokens: prompt tokens read in one round.
        tokenizer: gives tokens their text; None for ids alone.
        graphs: see `DecodeStep`.

    Attributes:
        state: of all slots.
        rounds: number of calls of `step` that had something to do.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        slots: int = 8,
        max_length: int = 2048,
        prefill_tokens: int = 8192,
        tokenizer: Tokenizer | None = None,
        graphs: bool = True,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.slots = slots
        self.max_length = max_length
        self.prefill_tokens = prefill_tokens
        self.rounds = 0
        self._device = model.embedding.weight.device
        with torch.no_grad():
            self.state = model.new_state(state_rows(slots, self._device), max_length)
            self._decode_step = DecodeStep(model, self.state, graphs)
        self._waiting: deque[Job] = deque()
        self._entering: list[Job] = []  # their prompts are being read, into a state of their own
        self._entering_state: DecodingState | None = None
        self._read = 0  # prompt tokens of `_entering` read so far
        self._running: list[Job] = []  # job i in row i of the state
        self._sampler: Sampler | None = None

    def check(self, request: Request) -> None:
        """Raises a ValueError, which names the field, for a request that cannot be answered."""
        vocab_size = self.model.config.vocab_size
        length = len(request.prompt)
        if not length:
            raise ValueError("prompt: got an empty one, expected at least one token")
        for token in request.prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompt: got token {token}, expected ids from 0 to {vocab_size - 1}")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {request.max_new_tokens}, expected at least 1")
        if length + request.max_new_tokens > self.max_length:
            raise ValueError(
                f"max_new_tokens: got {request.max_new_tokens} after a prompt of {length} tokens, "
                f"expected at most {self.max_length} tokens together"
            )
        if request.stop and self.tokenizer is None:
            raise ValueError("stop: got strings, but the model has no tokenizer")

    def submit(self, request: Request, emit: Callable[[Token], None]) -> Job:
        """Queue a request.

        Raises:
            ValueError: see `check`.
        """
        self.check(request)
        job = Job(request, emit, self.tokenizer)
        self._waiting.append(job)
        return job

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._entering or self._running)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot, or are about to."""
        return len(self._running) + len(self._entering)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @torch.no_grad()
    def step(self) -> None:
        """One round: read a piece of the prompts that come next, and continue every request in a slot by a token."""
        self._drop_cancelled()
        if not self.busy:
            return
        self.rounds += 1
        self._prefill()
        self._decode()

    def clear(self) -> None:
        """Give up every request."""
        self._waiting.clear()
        self._entering, self._entering_state = [], None
        self._running = []

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        if self._entering and all(job.cancelled for job in self._entering):
            self._entering, self._entering_state = [], None
        self._free([row for row, job in enumerate(self._running) if job.cancelled])

    def _prefill(self) -> None:
        if not self._entering:
            self._entering = self._next_group()
            if not self._entering:
                return
            self._entering_state = self.model.new_state(len(self._entering), self.max_length)
            self._read = 0
        assert self._entering_state is not None
        prompts = [job.request.prompt[self._read : self._read + self.prefill_tokens] for job in self._entering]
        ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        logits = self.model.prefill(ids.to(self._device), self._entering_state, mask.to(self._device))
        self._read += ids.shape[1]
        if self._read >= len(self._entering[0].request.prompt):
            self._enter(logits)

    def _next_group(self) -> list[Job]:
        """The requests whose prompts are read next: several only if one piece takes them all, on the CPU one."""
        limit = min(self.slots - len(self._running), 1 if self._device.type == "cpu" else self.slots)
        group: list[Job] = []
        tokens = 0
        while self._waiting and len(group) < limit:
            tokens += len(self._waiting[0].request.prompt)
            if group and tokens > self.prefill_tokens:
                break
            group.append(self._waiting.popleft())
        return group

    def _enter(self, logits: Tensor) -> None:
        """Draw the first tokens, and move those that go on into slots."""
        assert self._entering_state is not None
        jobs, state = self._entering, self._entering_state
        self._entering, self._entering_state = [], None
        sampler = Sampler([job.draws for job in jobs], self.model.config.vocab_size, self._device)
        done = self._draw(jobs, logits, sampler)
        for row, job in enumerate(jobs):
            if row not in done:
                self.state.copy_row(len(self._running), state, row)
                self._running.append(job)
                self._sampler = None

    def _decode(self) -> None:
        if not self._running:
            return
        logits = self._decode_step([job.tokens[-1] for job in self._running])
        if self._sampler is None:
            rows = [job.draws for job in self._running]
            self._sampler = Sampler(rows, self.model.config.vocab_size, self._device)
        self._free(self._draw(self._running, logits, self._sampler))

    def _draw(self, jobs: list[Job], logits: Tensor, sampler: Sampler) -> list[int]:
        """Give each job its next token. Returns the rows that are done."""
        tokens = sampler(logits)
        drawn = tokens.tolist()
        if not any(job.request.log_probs or job.request.top_log_probs for job in jobs):
            return [row for row, job in enumerate(jobs) if job.take(drawn[row])]
        most = max(job.request.top_log_probs for job in jobs)
        values = log_probabilities(logits[:, : self.model.config.vocab_size], tokens, most)
        log_probs, best, best_ids = (value.tolist() for value in values)
        done = []
        for row, job in enumerate(jobs):
            top = list(zip(best_ids[row], best[row], strict=True))[: job.request.top_log_probs]
            if job.take(drawn[row], log_probs[row] if job.request.log_probs else None, top):
                done.append(row)
        return done

    def _free(self, rows: list[int]) -> None:
        """Take jobs out; the last ones move into the rows that they leave, so that rows in use stay together."""
        for row in reversed(rows):
            last = self._running.pop()
            if row < len(self._running):
                self.state.copy_row(row, self.state, len(self._running))
                self._running[row] = last
            self._sampler = None
