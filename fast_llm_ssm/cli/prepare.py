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
            raise UserError("got --config and --text, --jsonl or --tokenizer, expected either")
        chosen, token_config = _from_run_file(config, overrides or [], source)
    else:
        if overrides or source is not None:
            raise UserError(f"got {' '.join(overrides or ['--source'])} without --config, expected --config RUN_FILE")
        if bool(text) == bool(jsonl) or tokenizer is None:
            raise UserError("expected --text or --jsonl, and --tokenizer; or --config")
        chosen, token_config = _from_flags(text, split, delimiter, jsonl, field, tokenizer)
    _prepare(chosen, token_config, output)


def _from_run_file(path: Path, overrides: list[str], number: int | None) -> tuple[SourceConfig, TokenizerConfig]:
    import fast_llm_ssm
    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.data.sources import TokensSource

    data = fast_llm_ssm.load_config(path, *overrides).data
    if data is None or data.tokenizer is None:
        raise UserError(f"{path}: no {'data' if data is None else 'data.tokenizer'}, expected one to prepare with")
    if number is None:
        if len(data.sources) > 1:
            listed = ", ".join(f"{index} ({source.type})" for index, source in enumerate(data.sources))
            raise UserError(f"{path}: several data.sources, expected --source with one of {listed}")
        number = 0
    if not 0 <= number < len(data.sources):
        raise UserError(f"--source {number}: expected a number below {len(data.sources)}, as {path} has data.sources")
    if isinstance(data.sources[number], TokensSource):
        raise UserError(f"{path}: data.sources.{number} is prepared already")
    return data.sources[number], data.tokenizer


def _from_flags(
    text: list[str] | None,
    split: str,
    delimiter: str | None,
    jsonl: list[str] | None,
    field: str,
    tokenizer: str,
) -> tuple[SourceConfig, TokenizerConfig]:
    from fast_llm_ssm.data import data_sources, tokenizers

    values: dict[str, Any]
    if text:
        name, values = "text", {"paths": text, "split": split, "delimiter": delimiter}
    else:
        name, values = "jsonl", {"paths": jsonl, "field": field}
    source = data_sources[name].model_validate(values)
    if tokenizer == "bytes":
        return source, tokenizers["bytes"].model_validate({})
    return source, tokenizers["huggingface"].model_validate({"path": tokenizer})


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
