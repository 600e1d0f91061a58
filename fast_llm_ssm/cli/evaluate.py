"""`fast-llm evaluate`: a checkpoint's perplexity on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fast_llm_ssm.cli.options import AllowPlugins, Device, Dtype, Weights


def evaluate(
    checkpoint: Weights,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text, in UTF-8: one document.")],
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens that a window reads.")] = 2048,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens by which windows advance; half of the window by default.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    allow_plugins: AllowPlugins = False,
) -> None:
    """Print perplexity and bits per byte. Each token is predicted from those before it in its window."""
    from rich.console import Console
    from rich.progress import Progress

    from fast_llm_ssm.cli.weights import load
    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.convert.load import load_tokenizer_of
    from fast_llm_ssm.generate.perplexity import score

    try:
        content = text.read_bytes().decode()
    except OSError as error:
        raise UserError(f"--text: cannot read {text}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text: {text} is not UTF-8 (byte {error.start})") from None
    tokenizer = load_tokenizer_of(checkpoint)
    if tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer, expected one")
    ids = tokenizer.encode_prompt(content)
    if len(ids) < 2:
        raise UserError(f"--text: {text} has {len(ids)} tokens, expected at least 2")
    model = load(checkpoint, device, dtype, allow_plugins)
    # Without a token that begins a text, the first one is not predicted.
    predicted = len(content.encode()) - len(tokenizer.decode(ids[:1]).encode())
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("evaluate", total=len(ids) - 1)
        try:
            result = score(
                model,
                ids,
                sequence_length,
                stride or -(-sequence_length // 2),
                lambda done: bar.update(task, completed=done),
            )
        except ValueError as error:
            raise UserError(f"--{error}") from None
    print(f"tokens         {result.num_targets:,} of {predicted:,} bytes")
    print(f"loss           {result.nats_per_token:.4f} nats a token")
    print(f"perplexity     {result.perplexity:.4f}")
    print(f"bits per byte  {result.bits_per_byte(max(predicted, 1)):.4f}")
