"""`fast-llm bench-generate`: time to first token, and tokens a second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fast_llm_ssm.cli.options import AllowPlugins, Device, Dtype


def bench_generate(
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint, a run folder, or a Hugging Face folder.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Or a run file: random weights.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="May be given several times.")] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, of which the median counts.")] = 3,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens read in one round.")] = 8192,
    device: Device = None,
    dtype: Dtype = None,
    cuda_graphs: Annotated[bool, typer.Option(help="Step through captured CUDA graphs, on a GPU.")] = True,
    allow_plugins: AllowPlugins = False,
) -> None:
    """Time greedy generation from random prompts."""
    from fast_llm_ssm.cli.weights import load, pick_device, pick_dtype
    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.generate.bench import measure
    from fast_llm_ssm.model import build_model
    from fast_llm_ssm.train.config import load_config

    if (checkpoint is None) == (config is None):
        raise UserError("expected one of --checkpoint and --config")
    if checkpoint is not None:
        model = load(checkpoint, device, dtype, allow_plugins)
    else:
        assert config is not None
        model = build_model(load_config(config), pick_device(device), pick_dtype(dtype))
    print(f"{model.num_parameters():,} parameters, {model.dtype} on {model.embedding.weight.device}")
    print(" batch  prompt   new   first token   prefill tok/s   decode tok/s   ms/step   state MiB")
    for size in batch_size or [1]:
        speed = measure(model, size, prompt_length, new_tokens, repeats, prefill_tokens, cuda_graphs)
        print(
            f"{size:6} {prompt_length:7} {new_tokens:5} {speed.first_token * 1e3:10.1f} ms {speed.prefill_rate:15,.0f} "
            f"{speed.decode_rate:14,.0f} {speed.step * 1e3:9.2f} {speed.state_bytes / 2**20:11,.1f}",
            flush=True,
        )
