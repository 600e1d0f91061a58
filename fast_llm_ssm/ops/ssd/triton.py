"""Triton backend of SSD: the plan of a call, the launches, and the custom operators around them.

Forward: decays -> C B^T tiles -> states from chunk to chunk -> outputs. Backward: C B^T tiles again -> state
gradients in reverse -> dx -> dC -> dB -> steps.
Every output element has one writer and every sum one order, so results are the same bits in every run.
"""

import math

import torch
import triton
from torch import Tensor

from fast_llm_ssm.ops.ssd import triton_launch as launch
from fast_llm_ssm.ops.ssd.triton_config import config_for
from fast_llm_ssm.ops.ssd.triton_decay import step_grad_kernel


@torch.library.custom_op("fast_llm_ssm::ssd_forward", mutates_args=())
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_states: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, softplus: bool, dt_min: float, dt_max: float, want_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, final states (or empty), states at the chunks' starts, y before the gate (or empty)."""
    x, dt, B, C = launch.flat(x), launch.flat(dt), launch.flat(B), launch.flat(C)
    plan = launch.plan(x, B, seq_idx, cu_seqlens, initial_states is not None or want_final)
    decays = launch.decays(plan, dt, A, dt_bias, softplus, dt_min, dt_max)
    first = None if initial_states is None else initial_states.contiguous()
    states, last, _ = launch.carry_states(plan, x, B, decays, first, want_final, reverse=False)
    y = launch.scan(plan, x, C, B, states, decays, None if D is None else D.contiguous(), False, x.dtype)
    ungated = y.new_empty(0)
    if z is not None:
        ungated = y
        y, _ = launch.gate(ungated, z, None)
    return y, last if last is not None else y.new_empty(0, dtype=torch.float32), states, ungated


@_forward.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, softplus, dt_min, dt_max, want_final):
    batch, length, heads, dim = x.shape
    state = B.shape[3]
    config = config_for(dim, state, x.dtype)
    own = cu_seqlens is not None and (initial_states is not None or want_final)
    documents = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else 0
    chunks = (
        batch * length // config.chunk + documents if own else batch * ((length + config.chunk - 1) // config.chunk)
    )
    sequences = documents if own else batch
    cuts = (dim + config.block_p - 1) // config.block_p
    final = x.new_empty((sequences, heads, dim, state) if want_final else (0,), dtype=torch.float32)
    states = x.new_empty((chunks, heads * cuts, config.block_p, config.block_n), dtype=config.operand_dtype)
    return x.new_empty(x.shape), final, states, x.new_empty(x.shape if z is not None else (0,))


@torch.library.custom_op("fast_llm_ssm::ssd_backward", mutates_args=())
def _backward(
    dout: Tensor, dfinal: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None,
    initial_states: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None, states: Tensor, ungated: Tensor,
    softplus: bool, dt_min: float,
    dt_max: float, had_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_states; empty where the input is absent."""
    x, dt, B, C = launch.flat(x), launch.flat(dt), launch.flat(B), launch.flat(C)
    dz = x.new_empty(0)
    if z is not None:
        dout, dz = launch.gate(ungated, z, dout)
    dout = launch.flat(dout)
    plan = launch.plan(x, B, seq_idx, cu_seqlens, initial_states is not None or had_final)
    config = plan.config
    decays = launch.decays(plan, dt, A, dt_bias, softplus, dt_min, dt_max)
    dfinal = None if dfinal is None else dfinal.contiguous()
    state_grads, dinitial, through = launch.carry_states(
        plan, dout, C, decays, dfinal, initial_states is not None, True, states
    )
    assert through is not None
    dx = launch.scan(plan, dout, B, C, state_grads, decays, None if D is None else D.contiguous(), True, x.dtype)
    per_head = D is not None and D.dim() == 1
    pair_grad, row_sums, col_sums, self_dots, self_pairs = launch.pair_grad(plan, dout, x, B, C, decays)
    dC, enter_sums = launch.edge_grad(plan, dout, C, B, states, pair_grad, decays, False)
    dB, leave_sums = launch.edge_grad(plan, x, B, C, state_grads, pair_grad, decays, True)
    ddt = torch.empty(dt.shape, device=dt.device, dtype=dt.dtype)
    dA = torch.empty(plan.chunks, plan.heads, device=dt.device, dtype=torch.float32)
    dbias = torch.empty_like(dA) if dt_bias is not None else None
    dskip = torch.empty_like(dA) if per_head else None
    block = 16
    step_grad_kernel[(plan.chunks, triton.cdiv(plan.heads, block))](
        dt, dt_bias, A, plan.seq_idx, plan.table, decays.steps, row_sums, col_sums, self_dots, self_pairs, enter_sums,
        leave_sums, through, ddt, dA, dbias, dskip,
        plan.length, plan.row_chunks, plan.total, plan.heads, plan.groups, dt.stride(1), dt.stride(2), dt_min, dt_max,
        SOFTPLUS=softplus, HAS_BIAS=dt_bias is not None, HAS_DOCS=plan.seq_idx is not None,
        TABLE=plan.table is not None, SKIP=per_head,
        CHUNK=config.chunk, BLOCK_H=block, CUTS=plan.cuts, BLOCK_P=config.block_p, ROWS=config.pair["ROWS"],
        num_warps=4,
    )  # fmt: skip
    dD = x.new_empty(0)
    if D is not None and dskip is not None:
        dD = dskip.sum(0).to(D.dtype)
    elif D is not None:
        dD = launch.skip_grad(x, dout).to(D.dtype)
    return (
        dx, ddt, dA.sum(0).to(A.dtype), dB, dC, dD, dz,
        x.new_empty(0) if dt_bias is None or dbias is None else dbias.sum(0).to(dt_bias.dtype),
        x.new_empty(0) if initial_states is None or dinitial is None else dinitial.to(initial_states.dtype),
    )  # fmt: skip


@_backward.register_fake
def _(
    dout,
    dfinal,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    initial_states,
    seq_idx,
    cu_seqlens,
    states,
    ungated,
    softplus,
    dt_min,
    dt_max,
    had_final,
):
    def like(tensor: Tensor | None) -> Tensor:
        return x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return tuple(like(tensor) for tensor in (x, dt, A, B, C, D, z, dt_bias, initial_states))


def _setup_context(ctx, inputs, output):
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, softplus, dt_min, dt_max, want_final = inputs
    _, _, states, ungated = output
    ctx.set_materialize_grads(False)  # the saved states never have a gradient; zeros of their size would be costly
    ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, states, ungated)
    ctx.options = (softplus, dt_min, dt_max, want_final)


def _autograd(ctx, dout, dfinal, _dstates, _dungated):
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, states, ungated = ctx.saved_tensors
    softplus, dt_min, dt_max, want_final = ctx.options
    if dout is None:
        dout = torch.zeros_like(x)
    grads = _backward(
        dout, dfinal if want_final else None, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens,
        states, ungated, softplus, dt_min, dt_max,
        want_final,
    )  # fmt: skip
    present = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    return *(grad if tensor is not None else None for grad, tensor in zip(grads, present, strict=True)), *(None,) * 6


_forward.register_autograd(_autograd, setup_context=_setup_context)


def unsupported(
    op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None,
    *args: object, **kwargs: object,
) -> str | None:  # fmt: skip
    """Why the kernels cannot take a call, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x.dtype}, the kernels take bfloat16, float16 and float32"
    if B.shape[3] > 256:
        return f"the state size is {B.shape[3]}, the kernels take up to 256"
    if x.numel() == 0:
        return "x is empty"
    return None


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """As `ops.ssd`. The chunk size is chosen by the kernels; the result does not depend on it."""
    y, final, _, _ = _forward(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens,
        dt_softplus,
        float(dt_limit[0]),
        float(dt_limit[1]),
        return_final_states,
    )
    return (y, final) if return_final_states else y


__all__ = ["ssd", "unsupported"]
