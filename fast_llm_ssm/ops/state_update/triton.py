"""Triton backend of the one-token state update: the state is read and written once.

Letters: B batch, H heads, P head dim, N state size, G groups.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, y_ptr,
    s_b, s_h, s_p, x_b, x_h, x_p, dt_b, dt_h, dt_p, a_h, a_p, a_n, b_b, b_g, c_b, c_g, d_h, d_p, z_b, z_h, z_p,
    bias_h, bias_p, heads, dim, size, heads_per_group, dt_min, dt_max,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, SCALAR_A: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    group = head // heads_per_group
    p, n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < dim, n < size
    inside = in_p[:, None] & in_n[None]
    states = state_ptr + row * s_b + head * s_h + p[:, None] * s_p + n[None]
    state = tl.load(states, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_b + head * x_h + p * x_p, mask=in_p, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_b + head * dt_h + p * dt_p, mask=in_p, other=0.0).to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(bias_ptr + head * bias_h + p * bias_p, mask=in_p, other=0.0).to(tl.float32)
    if SOFTPLUS:
        e = tl.exp(tl.minimum(dt, 20.0))
        # log(1 + e) loses digits of a small e: its series takes over there.
        dt = tl.where(dt > 20.0, dt, tl.where(e < 2e-3, e * (1.0 - e * (0.5 - e / 3.0)), tl.log(1.0 + e)))
    dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    b = tl.load(b_ptr + row * b_b + group * b_g + n, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_b + group * c_g + n, mask=in_n, other=0.0).to(tl.float32)
    if SCALAR_A:
        decay = tl.exp(dt * tl.load(a_ptr + head * a_h).to(tl.float32))[:, None]
    else:
        a = tl.load(a_ptr + head * a_h + p[:, None] * a_p + n[None] * a_n, mask=inside, other=0.0).to(tl.float32)
        decay = tl.exp(dt[:, None] * a)
    state = state * decay + (dt * x)[:, None] * b[None]
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(state * c[None], axis=1)
    if HAS_D:
        y += x * tl.load(d_ptr + head * d_h + p * d_p, mask=in_p, other=0.0).to(tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + row * z_b + head * z_h + p * z_p, mask=in_p, other=0.0).to(tl.float32)
        y *= z * tl.sigmoid(z)
    out = y_ptr + (row * heads + head) * dim + p
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=in_p)


def unsupported(op: str, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *args: object) -> str | None:
    """Why the kernel cannot take a call, or None."""
    if torch.float64 in (state.dtype, x.dtype):
        return "an input is float64, the kernel computes in float32"
    return f"the state size is {B.shape[2]}, the kernel takes up to 1024" if B.shape[2] > 1024 else None


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
    """As `ops.selective_state_update`."""
    batch, heads, dim, size = state.shape
    scalar = A.dim() == 1

    def by_channel(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor if tensor.dim() == len(shape) else tensor[..., None].expand(shape)

    dt = by_channel(dt, (batch, heads, dim))
    bias = None if dt_bias is None else by_channel(dt_bias, (heads, dim))
    skip = None if D is None else by_channel(D, (heads, dim))
    if state.stride(3) != 1:
        raise ValueError("selective_state_update: the state's last dimension must be contiguous")
    B, C = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (B, C))
    y = torch.empty(batch, heads, dim, device=x.device, dtype=x.dtype)
    block_n = triton.next_power_of_2(size)
    block_p = min(triton.next_power_of_2(dim), max(1, 2048 // block_n))
    _kernel[(batch * heads, triton.cdiv(dim, block_p))](
        state, x, dt, A, B, C, skip, z, bias, y,
        *state.stride()[:3], *x.stride(), *dt.stride(), *((A.stride(0), 0, 0) if scalar else A.stride()),
        *B.stride()[:2], *C.stride()[:2], *((0, 0) if skip is None else skip.stride()),
        *((0, 0, 0) if z is None else z.stride()), *((0, 0) if bias is None else bias.stride()),
        heads, dim, size, heads // B.shape[1], float(dt_limit[0]), float(dt_limit[1]),
        HAS_D=skip is not None, HAS_Z=z is not None, HAS_BIAS=bias is not None, SOFTPLUS=dt_softplus, SCALAR_A=scalar,
        BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return y
