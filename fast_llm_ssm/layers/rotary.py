"""Rotary position embedding (RoFormer, arXiv 2104.09864), rotate-half convention."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fast_llm_ssm.config import Config


class RopeConfig(Config):
    """Rotation of the first `partial` share of each head's dimensions."""

    theta: float = Field(default=10000.0, gt=0)
    partial: float = Field(default=1.0, gt=0, le=1)

    def rotated_size(self, head_dim: int) -> int:
        return int(head_dim * self.partial)


def rotate(x: Tensor, positions: Tensor, config: RopeConfig) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: [B, T, heads, head_dim].
        positions: [B, T] integers.

    Returns:
        The same shape and dtype; angles and products are fp32 or better.
    """
    size = config.rotated_size(x.shape[-1])
    exponent = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    angle = positions[..., None, None].float() * config.theta**-exponent  # [B, T, 1, size / 2]
    return _Rotation.apply(x, angle.cos(), angle.sin())


class _Rotation(torch.autograd.Function):
    """Turns pairs (x_i, x_{i + size/2}). Linear in x, so the backward pass keeps the angles alone and turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second, cos, sin = first.to(wide), second.to(wide), cos.to(wide), sin.to(wide)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
