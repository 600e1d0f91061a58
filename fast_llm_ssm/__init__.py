"""Mamba 2 layers and hybrid language models, declared in YAML."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fast_llm_ssm.convert.load import load_model
    from fast_llm_ssm.model.build import build_model
    from fast_llm_ssm.train.config import load_config

__all__ = ["build_model", "load_config", "load_model"]

_HOMES = {
    "build_model": "fast_llm_ssm.model.build",
    "load_config": "fast_llm_ssm.train.config",
    "load_model": "fast_llm_ssm.convert.load",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the package itself is light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
