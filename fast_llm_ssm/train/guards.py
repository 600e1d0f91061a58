"""What is checked between the backward pass and the update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class TrainingStopped(Exception):
    """Training cannot go on; the message is one line for the user."""


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradients to a norm of at most `max_norm`, unless their norm is not finite.

    Returns:
        The norm of all gradients together, before.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if max_norm is not None and norm.isfinite():
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def describe_non_finite(model: nn.Module, loss: float) -> str:
    """Where NaN or infinity came in: the first weight that holds it, else the first gradient, else the loss."""
    for name, parameter in model.named_parameters():
        if what := _non_finite(parameter):
            return f"the weight {name} holds {what}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (what := _non_finite(parameter.grad)):
            return f"the gradient of {name} holds {what}, with loss {loss:.4g}"
    return f"the norm of the gradient overflows, with loss {loss:.4g}"


def _non_finite(tensor: Tensor) -> str | None:
    if torch.isfinite(tensor).all():
        return None
    return "NaN" if torch.isnan(tensor).any() else "infinity"
