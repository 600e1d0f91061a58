"""The engine in a thread of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time

from fast_llm_ssm.generate.engine import Engine, Job
from fast_llm_ssm.generate.request import Request, Token

logger = logging.getLogger(__name__)


class Failed(Exception):
    """The engine broke down over a batch; the request may be sent again."""


class Answer:
    """The tokens of one request, as they come. Belongs to the event loop that asked.

    Attributes:
        request: what was asked for.
        tokens: those that `next` has returned.
        first_after: seconds from the request to its first token; None before.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[Token] = []
        self.first_after: float | None = None
        self._began = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Token | Failed] = asyncio.Queue()
        self._job: Job | None = None
        self._closed = False
        self._ended = False

    async def next(self) -> Token:
        """The next token. The last has a reason to finish.

        Raises:
            Failed: the engine broke down.
        """
        item = await self._queue.get()
        if isinstance(item, Failed):
            raise item
        if not self.tokens:
            self.first_after = time.perf_counter() - self._began
        self.tokens.append(item)
        return item

    async def rest(self) -> None:
        """Wait for the last token."""
        while (await self.next()).finish is None:
            pass

    @property
    def text(self) -> str:
        """Of the tokens so far."""
        return "".join(token.text for token in self.tokens)

    def close(self) -> None:
        """Give the request up, if it is still running."""
        self._closed = True
        if self._job is not None:
            self._job.cancel()

    @property
    def over(self) -> bool:
        """Whether the engine has nothing more to do for it."""
        return self._ended or self._closed

    def admit(self, engine: Engine) -> None:
        """In the worker's thread: hand the request to the engine."""
        if not self._closed:
            self._job = engine.submit(self.request, self.put)
            if self._closed:  # in the meantime
                self._job.cancel()

    def put(self, item: Token | Failed) -> None:
        """In the worker's thread: pass an item on."""
        self._ended = isinstance(item, Failed) or item.finish is not None
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class Worker:
    """Runs the engine while there are requests, and sleeps while there are none.

    Attributes:
        problem: what the engine's last round failed with; None if it went well. A round follows every failed one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.problem: str | None = None
        self._inbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._answers: list[Answer] = []  # in the engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the round that it is in."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ask(self, request: Request) -> Answer:
        """Queue a request that passed `Engine.check`; call in an event loop."""
        answer = Answer(request)
        self._inbox.put(answer)
        return answer

    def _run(self) -> None:
        while self._admit():
            try:
                self.engine.step()
                self.problem = None
            except Exception as error:  # whatever a kernel raises: the requests in flight are lost, the server is not
                logger.exception("a round of generation failed")
                self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
                self.engine.clear()
                for answer in self._answers:
                    answer.put(Failed(f"generation failed ({self.problem})"))
                if self._answers:  # is it well again? Nobody might ask a server that says it is not.
                    self.engine.submit(Request([0], 1), lambda token: None)
            self._answers = [answer for answer in self._answers if not answer.over]

    def _admit(self) -> bool:
        """Take in what has been asked; wait for something if there is nothing to do. Returns False at the end."""
        wait = not self.engine.busy
        while wait or not self._inbox.empty():
            answer = self._inbox.get()
            if answer is None:
                return False
            answer.admit(self.engine)
            self._answers.append(answer)
            wait = False
        return True
