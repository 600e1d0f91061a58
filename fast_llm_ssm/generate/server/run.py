"""From a model to a server that listens."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import uvicorn

from fast_llm_ssm.config import UserError
from fast_llm_ssm.data.tokenizer import Tokenizer
from fast_llm_ssm.generate.engine import Engine
from fast_llm_ssm.generate.request import Request
from fast_llm_ssm.generate.sampling import SamplingOptions
from fast_llm_ssm.generate.server.app import Server
from fast_llm_ssm.generate.server.settings import ServerSettings
from fast_llm_ssm.generate.worker import Worker
from fast_llm_ssm.model import HybridModel


def make_engine(model: HybridModel, tokenizer: Tokenizer, settings: ServerSettings, graphs: bool = True) -> Engine:
    """An engine as the settings say, warm: it has read prompts of several lengths and drawn in every way."""
    engine = Engine(
        model,
        slots=settings.max_batch_size,
        max_length=settings.max_total_tokens,
        prefill_tokens=settings.max_batch_prefill_tokens,
        tokenizer=tokenizer,
        graphs=graphs,
    )
    warm_up(engine, settings.max_input_length)
    return engine


def warm_up(engine: Engine, longest: int) -> None:
    """Have kernels compiled and memory taken before the first request comes."""
    options = [SamplingOptions(), SamplingOptions(temperature=1.0, top_k=2, top_p=0.9, repetition_penalty=1.1)]
    lengths = {1, min(2, longest), min(64, longest), longest if engine.state.lengths.is_cuda else min(64, longest)}
    for length in sorted(lengths):
        new_tokens = min(3, engine.max_length - length)
        for option in options:
            request = Request([0] * length, new_tokens, option, log_probs=True, top_log_probs=1)
            engine.submit(request, lambda token: None)
            while engine.busy:
                engine.step()
    if engine.state.lengths.is_cuda:
        torch.cuda.synchronize()


def serve(engine: Engine, settings: ServerSettings, ready: Callable[[str], None]) -> None:
    """Answer requests until SIGINT or SIGTERM; requests in flight then have ten seconds.

    Args:
        engine: warm, with a tokenizer.
        settings: of the server.
        ready: called with the server's address once it listens.

    Raises:
        UserError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}") from None
    host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
    worker = Worker(engine)
    config = uvicorn.Config(
        Server(worker, settings).app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=10,
    )
    worker.start()
    ready(f"http://{host}:{listening.getsockname()[1]}")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        worker.stop()
