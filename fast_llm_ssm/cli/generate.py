"""`fast-llm generate`: continue a prompt with a checkpoint's model."""

from __future__ import annotations

from typing import Annotated

import typer

from fast_llm_ssm.cli.options import AllowPlugins, Device, Dtype, Weights


def generate(
    checkpoint: Weights,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens whose probabilities sum to p.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 weakens tokens seen before.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Read and print token ids in place of text.")] = False,
    allow_plugins: AllowPlugins = False,
) -> None:
    """Continue a prompt; prints what was generated, as it comes, and nothing else."""
    from fast_llm_ssm.cli.weights import load
    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.convert.load import load_tokenizer_of
    from fast_llm_ssm.generate import Engine, Request, SamplingOptions, Token

    try:
        options = SamplingOptions(temperature, top_k, top_p, seed, repetition_penalty)
    except ValueError as error:
        name, _, message = str(error).partition(":")
        raise UserError(f"--{name.replace('_', '-')}:{message}") from None
    if token_ids and stop:
        raise UserError("--stop: got a text, expected none beside --token-ids")
    tokenizer = None if token_ids else load_tokenizer_of(checkpoint)
    if tokenizer is None and not token_ids:
        raise UserError(f"{checkpoint} has no tokenizer: --token-ids reads and prints ids in place of text")
    ids = _parse_ids(prompt) if tokenizer is None else tokenizer.encode_prompt(prompt)
    if not ids:
        raise UserError("--prompt: got an empty one, and the tokenizer has no token that begins a text")
    model = load(checkpoint, device, dtype, allow_plugins)
    engine = Engine(model, slots=1, max_length=len(ids) + max_new_tokens, tokenizer=tokenizer)
    stop_ids = [tokenizer.eos_id] if tokenizer is not None and tokenizer.eos_id is not None else []

    def show(token: Token) -> None:
        if tokenizer is not None:
            print(token.text, end="", flush=True)
        else:
            print(token.id, end=" " if token.finish is None else "", flush=True)

    try:
        engine.submit(Request(ids, max_new_tokens, options, stop_ids, stop or []), show)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    while engine.busy:
        engine.step()
    print()


def _parse_ids(prompt: str) -> list[int]:
    from fast_llm_ssm.config import UserError

    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--prompt: got {prompt!r}, expected token ids, as in '1 42 7', since --token-ids") from None
