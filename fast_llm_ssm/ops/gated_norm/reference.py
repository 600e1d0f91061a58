"""Gated RMSNorm in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """The reference of `fast_llm_ssm.ops.gated_rms_norm`, which see."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    value = x.to(dtype)
    gate = None if z is None else F.silu(z.to(dtype))
    if gate is not None and not norm_before_gate:
        value = value * gate
    groups = value.unflatten(-1, (-1, group_size or x.shape[-1]))
    value = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.to(dtype)
    if bias is not None:
        value = value + bias.to(dtype)
    if gate is not None and norm_before_gate:
        value = value * gate
    return value.to(x.dtype)
