"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the run file, as in optim.lr=3e-4.", show_default=False),
]
Weights = Annotated[
    Path, typer.Option("--checkpoint", metavar="DIR", help="A checkpoint, a run folder, or a Hugging Face folder.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights: fp32 or bf16; as stored by default.")]
AllowPlugins = Annotated[
    bool, typer.Option("--allow-plugins", help="Import the plugins that the checkpoint's config names.")
]
