"""The HTTP server's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fast_llm_ssm.generate.request import Token
from fast_llm_ssm.generate.server.bodies import CompletionBody, GenerateBody, Refused, parse
from fast_llm_ssm.generate.server.metrics import Metrics
from fast_llm_ssm.generate.server.protocols import Completions, Protocol, TextGeneration
from fast_llm_ssm.generate.server.settings import ServerSettings
from fast_llm_ssm.generate.worker import Answer, Failed, Worker

_LOCAL_NAMES = {"localhost", "127.0.0.1", "[::1]"}
_KINDS = {401: "authentication", 429: "overloaded", 500: "generation", 503: "unhealthy", 504: "timeout"}
_CLIENT_GONE = 499  # nobody sees it but the metrics
_GRACE = 5.0  # seconds after the time limit in which a stream may still say so


class Server:
    """Endpoints over one worker; the application is `app`."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        tokenizer = worker.engine.tokenizer
        assert tokenizer is not None
        self._worker = worker
        self._tokenizer = tokenizer
        self._settings = settings
        self._metrics = Metrics(worker.engine)
        self._in_flight = 0
        self.app = FastAPI(title="fast-llm", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_exception_handler(Refused, self._refuse)
        self.app.add_exception_handler(HTTPException, self._refuse)
        self.app.add_exception_handler(Exception, self._refuse)
        self.app.post("/", response_model=None)(self.either)
        self.app.post("/generate", response_model=None)(self.generate)
        self.app.post("/generate_stream", response_model=None)(self.generate_stream)
        self.app.post("/v1/completions", response_model=None)(self.completions)
        self.app.get("/health", response_model=None)(self.health)
        self.app.get("/info", response_model=None)(self.info)
        self.app.get("/metrics", response_model=None)(self.metrics)

    async def generate(self, http: Request) -> Response:
        body = parse(await self._body(http), GenerateBody)
        if body.stream:
            raise Refused(422, "stream: got true, expected such a request at /generate_stream")
        return await self._respond(http, TextGeneration(body, False, self._tokenizer))

    async def generate_stream(self, http: Request) -> Response:
        body = parse(await self._body(http), GenerateBody)
        return await self._respond(http, TextGeneration(body, True, self._tokenizer))

    async def either(self, http: Request) -> Response:
        """Where the clients of text-generation-inference ask: the body says whether to stream."""
        body = parse(await self._body(http), GenerateBody)
        return await self._respond(http, TextGeneration(body, body.stream, self._tokenizer))

    async def completions(self, http: Request) -> Response:
        body = parse(await self._body(http), CompletionBody)
        return await self._respond(http, Completions(body, self._tokenizer, self._settings.model_id))

    async def health(self) -> Response:
        """200 once the model is warm, which is before the server listens; 503 after a failed round."""
        problem = self._worker.problem if self._worker.alive else "the engine has ended"
        return PlainTextResponse(problem or "", 503 if problem else 200)

    async def info(self, http: Request) -> dict[str, Any]:
        self._authorize(http)
        s, weight = self._settings, self._worker.engine.model.embedding.weight
        return {
            "model_id": s.model_id,
            "model_dtype": str(weight.dtype),
            "model_device_type": weight.device.type,
            "max_concurrent_requests": s.max_concurrent_requests,
            "max_best_of": 1,
            "max_stop_sequences": 16,
            "max_input_length": s.max_input_length,
            "max_input_tokens": s.max_input_length,
            "max_total_tokens": s.max_total_tokens,
            "max_batch_prefill_tokens": s.max_batch_prefill_tokens,
            "max_batch_size": s.max_batch_size,
            "version": metadata.version("fast-llm-ssm") if _installed() else "unknown",
        }

    async def metrics(self, http: Request) -> Response:
        self._authorize(http)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _authorize(self, http: Request) -> None:
        key = self._settings.api_key
        if key is not None:
            given = http.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                raise Refused(401, "Authorization: expected `Bearer` and the server's API key")
            return
        # Without a key a web page could reach the server under a name of its own that leads to this machine.
        name = http.headers.get("host", "").lower()
        name = name if name.endswith("]") else name.rpartition(":")[0] or name
        if name not in _LOCAL_NAMES and name != self._settings.host:
            raise Refused(403, f"Host: got {name!r}, expected localhost or 127.0.0.1 (an API key lifts this)")

    async def _body(self, http: Request) -> bytes:
        """The request's body, from a client that may ask.

        Raises:
            Refused: not authorized, not said to be JSON, too long, or too slow.
        """
        self._authorize(http)
        kind = http.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, f"Content-Type: got {kind!r}, expected application/json")
        limit, body = self._settings.max_request_bytes, bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for chunk in http.stream():
                    body += chunk
                    if len(body) > limit:
                        raise Refused(413, f"the body has more than {limit} bytes")
        except TimeoutError:
            raise Refused(408, f"the body took longer than {self._settings.body_timeout:g} s") from None
        except ClientDisconnect:
            raise Refused(_CLIENT_GONE, "the client has gone") from None
        return bytes(body)

    async def _respond(self, http: Request, protocol: Protocol) -> Response:
        try:
            requests = await asyncio.to_thread(protocol.requests, self._tokenizer, self._settings)
            for request in requests:
                self._worker.engine.check(request)
        except ValueError as error:
            raise Refused(422, str(error)) from None
        most = self._settings.max_concurrent_requests
        if self._in_flight + len(requests) > most:
            raise Refused(429, f"{self._in_flight} requests are being answered, expected at most {most} at once")
        answers = [self._worker.ask(request) for request in requests]
        exchange = _Exchange(http, protocol, answers)
        self._in_flight += len(answers)
        if protocol.stream:
            return _Stream(self._events(exchange), self._settings.request_timeout, partial(self._end, exchange))
        try:
            await self._whole(exchange)
            return JSONResponse(protocol.reply(answers))
        except Refused as refused:
            exchange.refused = refused
            raise
        finally:
            self._end(exchange)

    async def _whole(self, exchange: _Exchange) -> None:
        """Wait for answers, while the client waits, and no longer than allowed."""
        work = asyncio.create_task(_rest(exchange.answers))
        gone = asyncio.create_task(_disconnection(exchange.http))
        try:
            limit = self._settings.request_timeout
            await asyncio.wait({work, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Refused(_CLIENT_GONE, "the client has gone") if gone.done() else self._too_long()
            work.result()
        except Failed as failed:
            raise Refused(500, str(failed)) from None
        finally:
            work.cancel()
            gone.cancel()

    async def _events(self, exchange: _Exchange) -> AsyncIterator[bytes]:
        """Server-sent events. Ended from outside when the client goes away."""
        answers, protocol = exchange.answers, exchange.protocol
        try:
            async for index, token in _in_turn(answers, exchange.began + self._settings.request_timeout):
                event = protocol.event(index, answers[index], token)
                if event is not None:
                    yield _event(event)
            for closing in protocol.closing(answers):
                yield _event(closing)
            exchange.complete = True
        except (TimeoutError, Failed) as error:
            exchange.refused = Refused(500, str(error)) if isinstance(error, Failed) else self._too_long()
            yield _event(_error(exchange.http, exchange.refused))

    def _end(self, exchange: _Exchange) -> None:
        """Free the slots, whatever became of the answers, and count."""
        self._in_flight -= len(exchange.answers)
        for answer in exchange.answers:
            answer.close()
            self._metrics.count(answer)
        self._metrics.duration.observe(time.monotonic() - exchange.began)
        if exchange.protocol.stream:
            gone = Refused(_CLIENT_GONE, "the client has gone") if not exchange.complete else None
            self._count(exchange.http, exchange.refused or gone)
        elif exchange.refused is None:
            self._count(exchange.http, None)

    def _count(self, http: Request, refused: Refused | None) -> None:
        status = refused.status if refused is not None else 200
        path = http.url.path if status not in (404, 405) else "other"
        self._metrics.requests.labels(path, status).inc()

    def _too_long(self) -> Refused:
        limit = self._settings.request_timeout
        return Refused(504, f"the request took longer than {limit:g} s (--request-timeout)")

    async def _refuse(self, http: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such path, or not by this method
            error = Refused(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
        elif not isinstance(error, Refused):  # ours: its traceback goes to the log
            error = Refused(500, "the server failed over this request")
        self._count(http, error)
        return JSONResponse(_error(http, error), error.status)


@dataclass
class _Exchange:
    """A request that is being answered."""

    http: Request
    protocol: Protocol
    answers: list[Answer]
    began: float = field(default_factory=time.monotonic)
    refused: Refused | None = None
    complete: bool = False  # all events were written


class _Stream(StreamingResponse):
    """Events; given up when a client that does not read keeps them waiting. Calls `end` whatever happens."""

    def __init__(self, events: AsyncIterator[bytes], timeout: float, end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._timeout = timeout
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout + _GRACE):
                    await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _in_turn(answers: list[Answer], deadline: float) -> AsyncIterator[tuple[int, Token]]:
    """Each new token with the number of its answer, as they come.

    Raises:
        TimeoutError: at the deadline, by the monotonic clock.
        Failed: the engine broke down.
    """
    waiting = {asyncio.create_task(answer.next()): index for index, answer in enumerate(answers)}
    try:
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for task in done:
                index, token = waiting.pop(task), task.result()
                yield index, token
                if token.finish is None:
                    waiting[asyncio.create_task(answers[index].next())] = index
    finally:
        for task in waiting:
            task.cancel()


async def _rest(answers: list[Answer]) -> None:
    for answer in answers:  # they go on side by side, whichever is waited for
        await answer.rest()


async def _disconnection(http: Request) -> None:
    """Returns when the client has gone; its body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any] | str) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def _error(http: Request, refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "validation")
    if http.url.path.startswith("/v1/"):
        return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.status}}
    return {"error": refused.message, "error_type": kind}


def _installed() -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("fast-llm-ssm"))
    return False
