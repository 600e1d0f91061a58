"""`fast-llm prepare`: text to a folder of token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fast_llm_ssm.data import SourceConfig, TokenizerConfig


def prepare(
    output: Annotated[Path, typer.Argument(help="The folder to write; new or empty.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="With --config: key=value changes to it.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A run file: prepare one of its data.sources.", show_default=False)
    ] = None,
    source: Annotated[
        int | None, typer.Option(help="With --config: which of data.sources, from 0.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Text files or a pattern; may be repeated.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="A document of --text is a file, or: blank_lines, delimiter.")] = "file",
    delimiter: Annotated[
        str | None, typer.Option(help="What separates documents, with --split delimiter.", show_default=False)
    ] = None,
    jsonl: Annotated[
        list[str] | None, typer.Option(help="JSON lines files or a pattern; may be repeated.", show_default=False)
    ] = None,
    field: Annotated[str, typer.Option(help="The field of --jsonl with the text.")] = "text",
    tokenizer: Annotated[
        str | None, typer.Option(help="`bytes`, or a Hugging Face tokenizer folder.", show_default=False)
    ] = None,
) -> None:
    """Tokenize text files into a folder for a source of type `tokens`. Run it again after an interruption to go on."""
    from fast_llm_ssm.config import UserError

    if config is not None:
        if text or jsonl or tokenizer is not None:
            raise UserError("got --config besides --text, --jsonl or --tokenizer, expected one or the other")
        inputs = _from_run_file(config, overrides or [], source)
    else:
        if overrides or source is not None:
            raise UserError(f"got {' '.join(overrides or ['--source'])} without --config, expected --config FILE")
        if bool(text) == bool(jsonl) or tokenizer is None:
            raise UserError("expected --text or --jsonl, and --tokenizer; or --config")
        described: dict[str, Any] = {"type": "jsonl", "paths": jsonl, "field": field}
        if text:
            described = {"type": "text", "paths": text, "split": split, "delimiter": delimiter}
        inputs = _from_flags(described, tokenizer)
    _prepare(*inputs, output)


def _from_run_file(path: Path, overrides: list[str], number: int | None) -> tuple[SourceConfig, TokenizerConfig]:
    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.data.sources import TokensSource
    from fast_llm_ssm.train.config import load_config

    data = load_config(path, *overrides).data
    if data is None or data.tokenizer is None:
        raise UserError(f"{path}: no `{'data' if data is None else 'data.tokenizer'}`, expected one to prepare with")
    if number is None and len(data.sources) > 1:
        listed = ", ".join(f"{index} ({source.type})" for index, source in enumerate(data.sources))
        raise UserError(f"{path}: has several data.sources, expected --source with one of {listed}")
    number = number or 0
    if not 0 <= number < len(data.sources):
        raise UserError(f"--source: got {number}, expected one of the {len(data.sources)} data.sources, from 0")
    source = data.sources[number]
    if isinstance(source, TokensSource):
        raise UserError(f"{path}: data.sources.{number} is prepared already")
    return source, data.tokenizer


def _from_flags(source: dict[str, Any], tokenizer: str) -> tuple[SourceConfig, TokenizerConfig]:
    from fast_llm_ssm.config import validate
    from fast_llm_ssm.data import PrepareConfig

    described = {"type": "bytes"} if tokenizer == "bytes" else {"type": "huggingface", "path": tokenizer}
    config = validate({"source": source, "tokenizer": described}, PrepareConfig, name="prepare")
    return config.source, config.tokenizer


def _prepare(source: SourceConfig, token_config: TokenizerConfig, output: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from fast_llm_ssm.data.prepare import Progress, prepare

    tokenizer = token_config.load()
    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=source.num_bytes())

        def show(progress: Progress) -> None:
            description = f"{progress.documents:,} documents {progress.tokens:,} tokens"
            bar.update(task, completed=progress.position, description=description)

        description = source.model_dump(mode="json", exclude={"weight"})
        documents = prepare(source.documents(), tokenizer, output, [description], show)
    print(
        f"{output}: {len(documents):,} documents, {len(documents.tokens):,} tokens ({documents.tokens.dtype.name})\n"
        f"data.sources: [{{type: tokens, path: {output}}}]"
    )
