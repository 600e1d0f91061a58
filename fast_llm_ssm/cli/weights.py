"""Loading a model for the commands that use one."""

from __future__ import annotations

from pathlib import Path

import torch

from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.model import HybridModel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(checkpoint: Path, device: str | None, dtype: str | None, allow_plugins: bool) -> HybridModel:
    """The model, as the options say.

    Raises:
        UserError: no such device or dtype; see `load_model`.
    """
    place, kind = pick_device(device), pick_dtype(dtype)
    return load_model(checkpoint, device=place, dtype=kind, allow_plugins=allow_plugins).eval()


def pick_device(device: str | None) -> torch.device:
    """The device named, or the GPU where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UserError(f"--device: got {device!r}, expected cpu or cuda") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device: got {device}, but PyTorch sees {torch.cuda.device_count()} GPUs")
    return place


def pick_dtype(dtype: str | None) -> torch.dtype | None:
    """The dtype named; None for None."""
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"--dtype: got {dtype!r}, expected {' or '.join(_DTYPES)}")
    return None if dtype is None else _DTYPES[dtype]
