"""Drawing initial weights: each parameter from its own generator, so that values depend on (seed, name) alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


class Init:
    """Fills parameters in place.

    Args:
        names: parameter -> its full name in the model.
        seed: of the run.
        std: standard deviation of embeddings and transformer matrices.
        num_residuals: additions to the residual stream in the whole model; projections that end a branch are scaled
            by its inverse square root so that the stream's variance doesn't grow with depth (GPT-2's rule, which
            the Mamba code applies to out_proj).
    """

    def __init__(self, names: Mapping[Tensor, str], seed: int, std: float, num_residuals: int):
        self._names = names
        self._seed = seed
        self.std = std
        self.residual_scale = max(1, num_residuals) ** -0.5

    def normal(self, parameter: Tensor, std: float | None = None, scale: float = 1.0) -> None:
        std = self.std if std is None else std
        parameter.normal_(0.0, std * scale, generator=self._generator(parameter))

    def uniform(self, parameter: Tensor, low: float, high: float) -> None:
        parameter.uniform_(low, high, generator=self._generator(parameter))

    def fan_in_uniform(self, parameter: Tensor, fan_in: int, scale: float = 1.0) -> None:
        """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), torch's default of Linear and Conv1d."""
        bound = scale * fan_in**-0.5
        self.uniform(parameter, -bound, bound)

    def _generator(self, parameter: Tensor) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{self._names[parameter]}".encode()).digest()
        return torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
