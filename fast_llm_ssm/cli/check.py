"""`fast-llm check`: is this run file right?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fast_llm_ssm.cli.options import Overrides, RunFile

if TYPE_CHECKING:
    from fast_llm_ssm.model import ModelConfig


def check(config: RunFile, overrides: Overrides = None) -> None:
    """Check a run file: all its mistakes at once, or one line about what it describes."""
    from fast_llm_ssm.model import build_meta
    from fast_llm_ssm.train.config import load_config

    run = load_config(config, *(overrides or ()))
    parts = [f"model {run.model.name}: {_layers(run.model)}"] if run.model else []
    if run.model:
        parts.append(f"{build_meta(run.model).num_parameters():,} parameters")
    print(f"{config}: OK; {', '.join(parts) or 'no model'}")


def _layers(model: ModelConfig) -> str:
    """`36 layers (30 m, 6 h)`."""
    blocks = Counter(model.layer_names)
    return f"{blocks.total()} layers ({', '.join(f'{count} {name}' for name, count in blocks.items())})"
