"""The command line: one file a command.

A command is a function of its module's name, with typer's annotations. Modules import what is slow (torch, the other
rooms) inside their functions: help must come at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import typer

from fast_llm_ssm.config import UserError


class Command(NamedTuple):
    name: str
    module: str
    help: str


COMMANDS = [
    Command("check", "check", "Check a run file; nothing is started."),
    Command("estimate", "estimate", "Print a model's layers, parameters, operations and memory."),
    Command("layers", "layers", "List the mixers that a run file can name."),
    Command("prepare", "prepare", "Tokenize text files into a folder of token files."),
    Command("train", "train", "Train a model, or go on with a run that was stopped."),
    Command("import", "import_", "Turn a Hugging Face folder into a checkpoint."),
    Command("export", "export", "Turn a checkpoint into a Hugging Face folder."),
    Command("generate", "generate", "Continue a prompt with a checkpoint's model."),
    Command("serve", "serve", "Answer requests over HTTP with a checkpoint's model."),
    Command("bench-generate", "bench_generate", "Measure how fast a model reads prompts and generates."),
    Command("evaluate", "evaluate", "Measure a checkpoint's perplexity on a text."),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Exit codes: 0, or what the command exits with; 2 for a mistake of the user (its text on stderr, no traceback);
    130 for Ctrl-C. Any other exception is ours and keeps its traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _application(arguments[0] if arguments else None)(arguments, prog_name="fast-llm")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while a command's module is imported; later typer sees it
        sys.exit(130)
    finally:
        _flush()


def _application(name: str | None) -> typer.Typer:
    """All commands for the help, but only the one asked for with its code imported."""
    application = typer.Typer(
        help="Mamba 2 layers and hybrid language models, declared in YAML.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_no_command)
    for command in COMMANDS:
        function = _import(command) if command.name == name else _no_command
        application.command(command.name, help=None if command.name == name else command.help)(function)
    return application


def _import(command: Command) -> Callable[..., None]:
    module = importlib.import_module(f"fast_llm_ssm.cli.{command.module}")
    return getattr(module, command.module)


def _no_command() -> None:
    """Stands for the commands that were not asked for."""


def _flush() -> None:
    """Write out what is buffered, unless the reader has gone (as in `fast-llm layers | head -1`)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
