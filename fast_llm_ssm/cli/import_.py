"""`fast-llm import`: a Hugging Face folder becomes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="HF_DIR", help="Holds config.json and the weights; or OWNER/NAME[@REVISION] on the hub."
        ),
    ],
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
    from fast_llm_ssm.convert.hub import download, is_hub_id
    from fast_llm_ssm.convert.importing import import_folder
    from fast_llm_ssm.convert.write import require_free

    changes = list(overrides or ())
    folder = Path(source)
    if is_hub_id(source):
        require_free(checkpoint_dir)
        folder = download(source)
        changes.insert(0, f"model.name={source.partition('@')[0].partition('/')[2]}")
    import_folder(folder, checkpoint_dir, changes)
