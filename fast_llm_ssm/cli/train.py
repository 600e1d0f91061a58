"""fast-llm train"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values in place of those of the file.")
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file.")] = Path("config.yaml"),
) -> None:
    """Train a model; the same command goes on with a run that was stopped."""
    from fast_llm_ssm.train.signals import EXIT_CODE, StopSignal

    stop = StopSignal()  # before the imports that take seconds
    from fast_llm_ssm.train.config import load_config
    from fast_llm_ssm.train.guards import TrainingStopped
    from fast_llm_ssm.train.trainer import train

    try:
        finished = train(load_config(config, *overrides or ()), stop)
    except TrainingStopped as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        stop.restore()
    if not finished:
        raise typer.Exit(EXIT_CODE)
