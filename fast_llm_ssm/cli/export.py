"""`fast-llm export`: a checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    checkpoint_dir: Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", help="A checkpoint or a run folder.")],
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="The new folder.")],
    format: Annotated[
        str | None, typer.Option(help="The layout; that of the import, or the one that can hold the model.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the tensors; those of the import, or as they are stored."),
    ] = None,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Import the plugins that the checkpoint's config names.")
    ] = False,
) -> None:
    """Turn a checkpoint into a folder that transformers, vLLM and others load."""
    import torch

    from fast_llm_ssm.convert.exporting import export_folder

    element_type = getattr(torch, dtype) if dtype else None
    export_folder(checkpoint_dir, hf_dir, format=format, dtype=element_type, allow_plugins=allow_plugins)
