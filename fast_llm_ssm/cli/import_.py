"""`fast-llm import`: a Hugging Face folder becomes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Holds config.json and the weights.")],
    checkpoint_dir: Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", help="The new checkpoint.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the model, as in model.name=mine, or mamba2.dt_limit=[0.0,.inf] for all mixers of a type.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn a Hugging Face folder into a checkpoint to train from, generate with and export again."""
    from fast_llm_ssm.convert.importing import import_folder

    import_folder(hf_dir, checkpoint_dir, overrides or ())
