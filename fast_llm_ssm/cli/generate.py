"""`fast-llm generate`: continue a prompt with a checkpoint's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, a run folder, or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens whose probabilities sum to p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU where there is one.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Read and print token ids in place of text.")] = False,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Import the plugins that the checkpoint's config names.")
    ] = False,
) -> None:
    """Continue a prompt; prints what was generated, nothing else."""
    import torch

    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.convert.load import load_model, load_tokenizer_of
    from fast_llm_ssm.generate import SamplingOptions
    from fast_llm_ssm.generate import generate as generate_tokens

    try:
        options = SamplingOptions(temperature, top_k, top_p, seed)
    except ValueError as error:
        raise UserError(f"--{str(error).replace('_', '-', 1)}") from None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = None if token_ids else load_tokenizer_of(checkpoint)
    if tokenizer is None and not token_ids:
        raise UserError(f"{checkpoint} has no tokenizer: --token-ids reads and prints ids in place of text")
    ids = _parse_ids(prompt) if tokenizer is None else tokenizer.encode_prompt(prompt)
    if not ids:
        raise UserError("--prompt: got an empty one, and the tokenizer has no token that begins a text")
    model = load_model(checkpoint, device=device, allow_plugins=allow_plugins)
    stop_ids = [tokenizer.eos_id] if tokenizer is not None and tokenizer.eos_id is not None else []
    try:
        (row,) = generate_tokens(model, [ids], max_new_tokens, options, stop_ids)
    except ValueError as error:
        raise UserError(str(error)) from None
    print(" ".join(map(str, row)) if tokenizer is None else tokenizer.decode([t for t in row if t not in stop_ids]))


def _parse_ids(prompt: str) -> list[int]:
    from fast_llm_ssm.config import UserError

    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--prompt: got {prompt!r}, expected token ids, as in '1 42 7', since --token-ids") from None
