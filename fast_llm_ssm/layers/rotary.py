"""Rotary position embedding (RoFormer, arXiv 2104.09864), rotate-half convention."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fast_llm_ssm.config import Config


class RopeConfig(Config):
    """Rotation of the first `partial` share of each head's dimensions.

    `type` says how the frequencies of `theta` are changed for texts longer than those of the first training:
    not at all; all divided by `factor` (linear); low ones divided, high ones kept (llama3); or by a larger theta, as
    Hymba does (hymba_ntk): theta * (2 * max_positions / original_max_positions - 1)^(D / (D - 2)).
    """

    type: Literal["default", "linear", "llama3", "hymba_ntk"] = "default"
    theta: float = Field(default=10000.0, gt=0)
    partial: float = Field(default=1.0, gt=0, le=1)
    factor: float = Field(default=1.0, gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    max_positions: int | None = Field(default=None, gt=0)
    original_max_positions: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> RopeConfig:
        needed = {"llama3": ["original_max_positions"], "hymba_ntk": ["max_positions", "original_max_positions"]}
        problems = [
            f"{key}: rope type {self.type} needs it" for key in needed.get(self.type, ()) if getattr(self, key) is None
        ]
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            problems.append(f"low_freq_factor: expected less than high_freq_factor ({self.high_freq_factor})")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def rotated_size(self, head_dim: int) -> int:
        return int(head_dim * self.partial)

    def frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """[rotated_size / 2] fp32, radians per position."""
        size, theta = self.rotated_size(head_dim), self.theta
        if self.type == "hymba_ntk":
            assert self.max_positions is not None and self.original_max_positions is not None
            theta *= (2 * self.max_positions / self.original_max_positions - 1) ** (size / (size - 2))
        frequency = theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        if self.type == "linear":
            return frequency / self.factor
        if self.type == "llama3":
            assert self.original_max_positions is not None
            turns = self.original_max_positions * frequency / (2 * math.pi)  # over the first training's length
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = kept.clamp(0, 1)
            return frequency * (kept + (1 - kept) / self.factor)
        return frequency


def rotate(x: Tensor, positions: Tensor, config: RopeConfig) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: [B, T, heads, head_dim].
        positions: [B, T] integers.

    Returns:
        The same shape and dtype; angles and products are fp32 or better.
    """
    angle = positions[..., None, None].float() * config.frequencies(x.shape[-1], x.device)  # [B, T, 1, size / 2]
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
