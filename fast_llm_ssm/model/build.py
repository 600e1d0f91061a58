"""From a config to a model."""

from __future__ import annotations

from typing import Protocol

import torch

from fast_llm_ssm.config import UserError
from fast_llm_ssm.layers.parts import parameter_dtype
from fast_llm_ssm.model.config import ModelConfig
from fast_llm_ssm.model.hybrid import HybridModel


class RunFile(Protocol):
    """A run file, of which only the model matters here."""

    @property
    def model(self) -> ModelConfig: ...


def build_meta(config: ModelConfig, dtype: torch.dtype | None = None) -> HybridModel:
    """The model without memory, with `expect.params` checked.

    Raises:
        UserError: the config gives another number of parameters than it expects.
    """
    try:
        with torch.device("meta"), parameter_dtype(dtype):
            model = HybridModel(config)
    except (RuntimeError, TypeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise UserError("model: a weight has more bytes than 64 bits can count, expected smaller sizes") from None
    count, expected = model.num_parameters(), config.expect.params
    if expected is not None and count != expected:
        raise UserError(f"model.expect.params: the config gives {count:,} parameters, expected {expected:,}")
    return model


def build_model(
    config: ModelConfig | RunFile,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> HybridModel:
    """A model with initial weights.

    Args:
        config: the `model:` section, or a run file.
        device: "meta" leaves the weights without memory.
        dtype: of the parameters, fp32 if None; what must stay fp32 does.
        seed: of the initial weights.

    Raises:
        UserError: the config gives another number of parameters than it expects; nothing was allocated.
    """
    model = build_meta(config if isinstance(config, ModelConfig) else config.model, dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed)
    return model
