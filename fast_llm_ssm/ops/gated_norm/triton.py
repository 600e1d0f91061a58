"""Triton backend of the gated RMSNorm: one read of each input and one write of each output, forward and backward.

Letters: M rows, D channels, K channels of a group. A program holds whole groups in registers. The backward keeps
nothing but the inputs; the weight's gradient is summed by a fixed number of programs, each over its own rows in order,
so results are the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264
"""Programs that share the rows of a backward pass: two for each multiprocessor of a Hopper GPU."""


@triton.jit
def _forward_kernel(
    x_ptr, z_ptr, w_ptr, y_ptr, x_stride, z_stride, y_stride, group_size, eps,
    HAS_GATE: tl.constexpr, NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    valid = cols < group_size
    cols += group * group_size
    x = tl.load(x_ptr + row * x_stride + cols, mask=valid, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=valid, other=0.0).to(tl.float32)
    gate = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_GATE:
        z = tl.load(z_ptr + row * z_stride + cols, mask=valid, other=0.0).to(tl.float32)
        gate = z * tl.sigmoid(z)
    if HAS_GATE and not NORM_FIRST:
        x *= gate
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / group_size + eps)
    y = x * scale * w
    if HAS_GATE and NORM_FIRST:
        y *= gate
    tl.store(y_ptr + row * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _backward_kernel(
    x_ptr, z_ptr, w_ptr, dy_ptr, dx_ptr, dz_ptr, dw_ptr, x_stride, z_stride, dy_stride, dx_stride, dz_stride,
    rows, width, group_size, eps,
    HAS_GATE: tl.constexpr, NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    valid = cols < group_size
    cols += group * group_size
    w = tl.load(w_ptr + cols, mask=valid, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for row_index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(row_index, tl.int64)
        x = tl.load(x_ptr + row * x_stride + cols, mask=valid, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=valid, other=0.0).to(tl.float32)
        u = x
        if HAS_GATE:
            z = tl.load(z_ptr + row * z_stride + cols, mask=valid, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(z)
            gate = z * sigmoid
            slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
            if not NORM_FIRST:
                u = x * gate
        scale = tl.rsqrt(tl.sum(u * u, axis=0) / group_size + eps)
        normed = u * scale
        if HAS_GATE and NORM_FIRST:
            dz = dy * normed * w * slope
            dy *= gate
        dw += dy * normed
        dn = dy * w
        du = scale * (dn - normed * (tl.sum(dn * normed, axis=0) / group_size))
        dx = du
        if HAS_GATE:
            if not NORM_FIRST:
                dx = du * gate
                dz = du * x * slope
            tl.store(dz_ptr + row * dz_stride + cols, dz.to(dz_ptr.dtype.element_ty), mask=valid)
        tl.store(dx_ptr + row * dx_stride + cols, dx.to(dx_ptr.dtype.element_ty), mask=valid)
    tl.store(dw_ptr + program * width + cols, dw, mask=valid)


def _rows(tensor: Tensor) -> Tensor:
    """[..., D] as [M, D] with neighbouring channels side by side: a view where the strides allow it."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _block(group_size: int) -> tuple[int, int]:
    """(channels a program holds, its warps)."""
    block = triton.next_power_of_2(group_size)
    return block, min(16, max(1, block // 512))


@torch.library.custom_op("fast_llm_ssm::gated_norm_forward", mutates_args=())
def _forward(x: Tensor, weight: Tensor, z: Tensor | None, eps: float, group_size: int, norm_first: bool) -> Tensor:
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rows, gates, out = _rows(x), None if z is None else _rows(z), y.view(-1, x.shape[-1])
    block, warps = _block(group_size)
    _forward_kernel[(rows.shape[0], x.shape[-1] // group_size)](
        rows, gates, weight, out, rows.stride(0), 0 if gates is None else gates.stride(0), out.stride(0), group_size,
        eps, HAS_GATE=z is not None, NORM_FIRST=norm_first, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y


@_forward.register_fake
def _(x, weight, z, eps, group_size, norm_first):
    return x.new_empty(x.shape)


@torch.library.custom_op("fast_llm_ssm::gated_norm_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, eps: float, group_size: int, norm_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and z (empty without a gate)."""
    width = x.shape[-1]
    rows, gates, grads = _rows(x), None if z is None else _rows(z), _rows(dy)
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    dz = torch.empty(x.shape if z is not None else 0, device=x.device, dtype=x.dtype if z is None else z.dtype)
    programs = min(_PROGRAMS, rows.shape[0])
    dw = torch.empty(programs, width, device=x.device, dtype=torch.float32)
    block, warps = _block(group_size)
    _backward_kernel[(programs, width // group_size)](
        rows, gates, weight, grads, dx, dz, dw, rows.stride(0), 0 if gates is None else gates.stride(0),
        grads.stride(0), width, width, rows.shape[0], width, group_size, eps,
        HAS_GATE=z is not None, NORM_FIRST=norm_first, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype), dz


@_backward.register_fake
def _(dy, x, weight, z, eps, group_size, norm_first):
    dz = x.new_empty(0) if z is None else z.new_empty(z.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dz


def _setup_context(ctx, inputs, output):
    x, weight, z, *ctx.options = inputs
    ctx.save_for_backward(x, weight, z)


def _autograd(ctx, dy):
    x, weight, z = ctx.saved_tensors
    dx, dw, dz = _backward(dy, x, weight, z, *ctx.options)
    return dx, dw, None if z is None else dz, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


def unsupported(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, *args: object) -> str | None:
    """Why the kernels cannot take a call, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x.dtype}, the kernels take bfloat16, float16 and float32"
    if bias is not None:
        return "the kernels have no bias"
    group_size = args[1] if len(args) > 1 and isinstance(args[1], int) else x.shape[-1]
    return f"a group has {group_size} channels, the kernels take up to 16384" if group_size > 16384 else None


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """As `ops.gated_rms_norm`."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return _forward(x, weight, z, eps, group_size or x.shape[-1], norm_before_gate)
