"""`fast-llm train`: begin a run, or go on with it."""

from __future__ import annotations

import sys

import typer

from fast_llm_ssm.cli.options import Overrides, RunFile


def train(config: RunFile, overrides: Overrides = None) -> None:
    """Train a model. The same command goes on with a run that was stopped.

    SIGTERM and Ctrl-C end the step, save and exit with code 75; a second one exits at once.
    """
    from fast_llm_ssm.train.signals import EXIT_CODE, StopSignal

    stop = StopSignal()  # before the imports that take seconds
    from fast_llm_ssm.train.config import load_config
    from fast_llm_ssm.train.guards import TrainingStopped
    from fast_llm_ssm.train.trainer import train

    try:
        finished = train(load_config(config, *(overrides or ())), stop)
    except TrainingStopped as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        stop.restore()
    if not finished:
        raise typer.Exit(EXIT_CODE)
