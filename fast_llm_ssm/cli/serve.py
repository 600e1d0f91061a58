"""`fast-llm serve`: answer requests over HTTP with a checkpoint's model."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from fast_llm_ssm.cli.options import AllowPlugins, Device, Dtype, Weights


def serve(
    checkpoint: Weights,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback an API key is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(envvar="FAST_LLM_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    max_input_length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    max_total_tokens: Annotated[int, typer.Option(help="Tokens of a prompt and its continuation.")] = 2048,
    max_batch_prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens read between two steps.")] = 4096,
    max_concurrent_requests: Annotated[int, typer.Option(help="Requests at once, waiting ones included.")] = 128,
    max_batch_size: Annotated[int, typer.Option(help="Requests continued at once; each takes memory.")] = 16,
    max_request_bytes: Annotated[int, typer.Option(help="Size of a request's body.")] = 1 << 20,
    request_timeout: Annotated[float, typer.Option(help="Seconds for all of a request.")] = 600.0,
    device: Device = None,
    dtype: Dtype = None,
    cuda_graphs: Annotated[bool, typer.Option(help="Step through captured CUDA graphs, on a GPU.")] = True,
    allow_plugins: AllowPlugins = False,
) -> None:
    """Serve text-generation-inference's /generate and /generate_stream, and OpenAI's /v1/completions."""
    import torch

    from fast_llm_ssm.cli.weights import load
    from fast_llm_ssm.config import ConfigErrors, UserError, validate
    from fast_llm_ssm.convert.load import load_tokenizer_of

    try:
        from fast_llm_ssm.generate.server.run import make_engine
        from fast_llm_ssm.generate.server.run import serve as serve_engine
        from fast_llm_ssm.generate.server.settings import ServerSettings
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'fast-llm-ssm[serve]'") from None
    values = {
        "model_id": checkpoint.resolve().name,
        "host": host,
        "port": port,
        "api_key": api_key,
        "max_input_length": max_input_length,
        "max_total_tokens": max_total_tokens,
        "max_batch_prefill_tokens": max_batch_prefill_tokens,
        "max_concurrent_requests": max_concurrent_requests,
        "max_batch_size": max_batch_size,
        "max_request_bytes": max_request_bytes,
        "request_timeout": request_timeout,
    }
    try:
        settings = validate(values, ServerSettings, name="options")
    except ConfigErrors as errors:
        lines = [f"--{error.path.replace('_', '-')}: {error.message}" for error in errors.errors]
        raise UserError("\n".join(lines)) from None
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    tokenizer = load_tokenizer_of(checkpoint)
    if tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer, expected one: requests and answers are text")
    model = load(checkpoint, device, dtype, allow_plugins)
    try:
        engine = make_engine(model, tokenizer, settings, cuda_graphs)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"too little memory, expected a lower --max-batch-size or --max-total-tokens: {error}"
        ) from None
    place, size = engine.state.lengths.device, engine.state.num_bytes / 2**20
    print(f"model   {settings.model_id}: {model.num_parameters():,} parameters, {model.dtype} on {place}")
    print(f"state   {size:,.0f} MiB for {max_batch_size} requests of {max_total_tokens} tokens", flush=True)
    serve_engine(engine, settings, lambda address: print(f"ready   {address}", flush=True))
