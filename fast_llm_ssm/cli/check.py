"""`fast-llm check`: is this run file right?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fast_llm_ssm.cli.options import Overrides, RunFile

if TYPE_CHECKING:
    from fast_llm_ssm.model import ModelConfig


def check(config: RunFile, overrides: Overrides = None) -> None:
    """Check a run file: all its mistakes at once, or one line about what it describes."""
    from fast_llm_ssm.config import UserError
    from fast_llm_ssm.model import build_meta
    from fast_llm_ssm.train.config import load_config

    run = load_config(config, *(overrides or ()))
    try:
        parameters = build_meta(run.model).num_parameters()
    except UserError as error:
        raise UserError(f"{config}: {error}") from None
    training = ""
    if run.train and run.data:
        training = f"; {run.train.steps:,} steps of {run.train.batch_size:,} x {run.data.sequence_length:,} tokens"
    print(f"{config}: OK; {_layers(run.model)}, {parameters:,} parameters{training}")


def _layers(model: ModelConfig) -> str:
    """`36 layers (30 m, 6 h)`."""
    blocks = Counter(model.layer_names)
    return f"{blocks.total()} layers ({', '.join(f'{count} {name}' for name, count in blocks.items())})"
