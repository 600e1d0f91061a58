"""One token of the selective state space recurrence in plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fast_llm_ssm.ops.ssd.reference import apply_dt


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """The reference of `fast_llm_ssm.ops.selective_state_update`, which see."""
    groups = B.shape[1]
    dtype = torch.float32
    for tensor in (state, x, dt, A, B, C):
        dtype = torch.promote_types(dtype, tensor.dtype)

    def by_channel(tensor: Tensor, full: int) -> Tensor:  # add trailing dimensions up to `full`
        return tensor.to(dtype)[(...,) + (None,) * (full - tensor.dim())]

    bias = None if dt_bias is None else by_channel(dt_bias, 2)
    dt = apply_dt(by_channel(dt, 3), bias, dt_softplus, dt_limit)[..., None]  # [B, H, P or 1, 1]
    B, C = (t.to(dtype).repeat_interleave(state.shape[1] // groups, dim=1)[:, :, None] for t in (B, C))  # [B, H, 1, N]
    value = x.to(dtype)
    new = state.to(dtype) * torch.exp(dt * by_channel(A, 3)) + dt * value[..., None] * B  # [B, H, P, N]
    state.copy_(new)
    y = (new * C).sum(-1)
    if D is not None:
        y = y + value * by_channel(D, 2)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype)
