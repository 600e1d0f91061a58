"""Triton backend of the causal convolution: custom operators around the kernels, final states, one-token update."""

import torch
import triton
from torch import Tensor

from fast_llm_ssm.ops.causal_conv1d.triton_kernels import backward_kernel, forward_kernel, update_kernel

_STEP = 128
"""Tokens of one program: long enough that its W - 1 tokens of overlap cost little."""

MAX_TAPS = 4


def _grid(x: Tensor) -> tuple[tuple[int, int], int, int]:
    """(grid, channels of a program, warps) for x [B, T, D]."""
    batch, length, width = x.shape
    block = min(512, triton.next_power_of_2(width))
    return (batch * triton.cdiv(length, _STEP), triton.cdiv(width, block)), block, max(1, block // 256)


def _channels_last(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


@torch.library.custom_op("fast_llm_ssm::causal_conv1d_forward", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, numbers: Tensor | None,
    bounds: Tensor | None, silu: bool,
) -> Tensor:  # fmt: skip
    """x [B, T, D], initial [rows, D, W - 1], numbers [B, T] of documents, bounds [documents + 1] -> y [B, T, D]."""
    x, weight = _channels_last(x), weight.contiguous()
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    initial = None if initial is None else initial.contiguous()
    grid, block, warps = _grid(x)
    forward_kernel[grid](
        x, weight, bias, initial, numbers, bounds, y, x.shape[1], x.shape[2], x.stride(0), x.stride(1),
        0 if numbers is None else numbers.stride(0),
        TAPS=weight.shape[1], HAS_BIAS=bias is not None, HAS_INITIAL=initial is not None,
        HAS_DOCS=numbers is not None, PER_DOC=bounds is not None, SILU=silu, STEP=_STEP, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y


@_forward.register_fake
def _(x, weight, bias, initial, numbers, bounds, silu):
    return x.new_empty(x.shape)


@torch.library.custom_op("fast_llm_ssm::causal_conv1d_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, numbers: Tensor | None,
    bounds: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias and initial; empty where the input is absent."""
    dy, x, weight = _channels_last(dy), _channels_last(x), weight.contiguous()
    width, taps = weight.shape
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    grid, block, warps = _grid(x)
    partial = torch.empty(grid[0], taps + 1, width, device=x.device, dtype=torch.float32)
    backward_kernel[grid](
        dy, x, weight, bias, None if initial is None else initial.contiguous(), numbers, bounds, dx, partial,
        x.shape[1], width, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1),
        0 if numbers is None else numbers.stride(0),
        TAPS=taps, HAS_BIAS=bias is not None, HAS_INITIAL=initial is not None, HAS_DOCS=numbers is not None,
        PER_DOC=bounds is not None, SILU=silu, STEP=_STEP, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    sums = partial.sum(0)
    dweight = sums[:taps].t().to(weight.dtype).contiguous()
    dbias = x.new_empty(0) if bias is None else sums[taps].to(bias.dtype)
    if initial is None:
        return dx, dweight, dbias, x.new_empty(0)
    return dx, dweight, dbias, _initial_grad(dy, x, weight, bias, initial, numbers, bounds, silu)


@_backward.register_fake
def _(dy, x, weight, bias, initial, numbers, bounds, silu):
    def like(tensor: Tensor | None) -> Tensor:
        return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return x.new_empty(x.shape), like(weight), like(bias), like(initial)


def _initial_grad(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor, numbers: Tensor | None,
    bounds: Tensor | None, silu: bool,
) -> Tensor:  # fmt: skip
    """Only the first W - 1 tokens of a document see its initial inputs: few enough for plain PyTorch."""
    taps = weight.shape[1]
    ahead = torch.arange(taps - 1, device=x.device)
    if bounds is not None:
        index = bounds[:-1, None].long() + ahead  # [documents, W - 1]
        own = index < bounds[1:, None]
        row = torch.zeros_like(index)
    else:
        index = ahead.expand(x.shape[0], -1)
        own = index < x.shape[1]
        row = torch.arange(x.shape[0], device=x.device)[:, None].expand_as(index)
        if numbers is not None:
            clamped = index.clamp(max=x.shape[1] - 1)
            own = own & (numbers.gather(1, clamped) == numbers[:, :1])
    index = index.clamp(max=x.shape[1] - 1)
    inputs = torch.cat([initial.float(), x[row, index].float().transpose(1, 2)], dim=2)  # [n, D, 2 (W - 1)]
    windows = inputs.unfold(2, taps, 1)  # [n, D, W - 1, W], one for each of the first tokens
    pre = torch.einsum("ndtw,dw->ndt", windows, weight.float())
    pre = pre if bias is None else pre + bias.float()[:, None]
    grad = dy[row, index].float().transpose(1, 2) * own[:, None]
    if silu:
        sigmoid = pre.sigmoid()
        grad = grad * sigmoid * (1 + pre * (1 - sigmoid))
    dinitial = torch.zeros_like(inputs)
    for tap in range(taps):
        dinitial[:, :, tap : tap + taps - 1] += grad * weight[:, tap, None].float()
    return dinitial[:, :, : taps - 1].to(initial.dtype)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, dy):
    x, weight, bias, initial, numbers, bounds = ctx.saved_tensors
    dx, dweight, dbias, dinitial = _backward(dy, x, weight, bias, initial, numbers, bounds, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None if initial is None else dinitial, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


def unsupported(op: str, x: Tensor, *args: object) -> str | None:
    """Why the kernels cannot take a call, or None."""
    weight = args[1] if op == "causal_conv1d_update" else args[0]
    assert isinstance(weight, Tensor)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x.dtype}, the kernels take bfloat16, float16 and float32"
    if weight.shape[1] > MAX_TAPS:
        return f"the filter has {weight.shape[1]} taps, the kernels take up to {MAX_TAPS}"
    return "x is empty" if x.numel() == 0 else None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `ops.causal_conv1d`."""
    tokens = x.transpose(1, 2)
    numbers, bounds = None if seq_idx is None else seq_idx.contiguous(), None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(x.device, torch.int32)
        place = torch.arange(x.shape[2], device=x.device, dtype=torch.int32)
        numbers = torch.searchsorted(bounds[1:].contiguous(), place, right=True, out_int32=True)[None]
    y = _forward(tokens, weight, bias, initial_states, numbers, bounds, activation is not None).transpose(1, 2)
    if not return_final_states:
        return y
    return y, _final_states(tokens, weight.shape[1] - 1, initial_states, seq_idx, bounds)


def _final_states(
    x: Tensor, size: int, initial: Tensor | None, seq_idx: Tensor | None, bounds: Tensor | None
) -> Tensor:
    """The last inputs of each row's last document, or of each document; x [B, T, D]. Differentiable."""
    batch, length, width = x.shape
    if bounds is not None:
        starts, ends = bounds[:-1].long(), bounds[1:].long()
        row = torch.zeros_like(starts)
    else:
        row = torch.arange(batch, device=x.device)
        ends = torch.full_like(row, length)
        starts = torch.zeros_like(row) if seq_idx is None else (seq_idx != seq_idx[:, -1:]).sum(1)
    back = torch.arange(size, device=x.device)
    index = ends[:, None] - size + back  # [n, size]
    tokens = x[row[:, None], index.clamp(min=0)].transpose(1, 2)  # [n, D, size]
    before = torch.zeros_like(tokens)
    if initial is not None:
        place = (back + (ends - starts)[:, None]).clamp(max=size - 1)
        before = initial.to(x.dtype).gather(2, place[:, None].expand(-1, width, -1))
        if bounds is None:  # a document that is not its row's first begins with zeros
            before = before * (starts == 0)[:, None, None]
    return torch.where((index >= starts[:, None])[:, None], tokens, before)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """As `ops.causal_conv1d_update`."""
    batch, width = x.shape
    y = torch.empty(batch, width, device=x.device, dtype=x.dtype)
    block = min(256, triton.next_power_of_2(width))
    update_kernel[(batch, triton.cdiv(width, block))](
        x, conv_state, weight, bias, y, width, *x.stride(), *conv_state.stride(), *weight.stride(),
        TAPS=weight.shape[1], HAS_BIAS=bias is not None, SILU=activation is not None, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return y


__all__ = ["causal_conv1d", "causal_conv1d_update", "unsupported"]
