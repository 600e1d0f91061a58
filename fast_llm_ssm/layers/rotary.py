"""Rotary position embedding (RoFormer, arXiv 2104.09864), rotate-half convention."""

from __future__ import annotations

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
    wide = torch.promote_types(x.dtype, torch.float32)
    exponent = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    angle = positions[..., None, None].float() * config.theta**-exponent  # [B, T, 1, size / 2]
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
    first, second = first.to(wide), second.to(wide)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
