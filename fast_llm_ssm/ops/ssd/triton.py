"""Triton backend of SSD: the plan of a call, the launches, and the custom operators around them.

Forward: decays -> C B^T tiles -> states from chunk to chunk -> outputs. Backward: C B^T tiles again -> state gradients in reverse -> dx -> dC -> dB -> steps.
Every output element has one writer and every sum one order, so results are the same bits in every run.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fast_llm_ssm.ops.ssd.triton_config import Config, config_for
from fast_llm_ssm.ops.ssd.triton_decay import decay_kernel, gate_kernel, product_kernel, skip_grad_kernel, step_grad_kernel
from fast_llm_ssm.ops.ssd.triton_grad import projection_grad_kernel
from fast_llm_ssm.ops.ssd.triton_scan import scan_kernel
from fast_llm_ssm.ops.ssd.triton_state import state_kernel


@dataclass
class Plan:
    """What every launch of one call shares."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    state: int
    cuts: int  # slices of a head
    chunks: int
    sequences: int  # rows, or documents with their own states
    row_chunks: int
    config: Config
    table: Tensor | None  # [chunks, 2] first token and length, for documents with their own states
    sequence_chunks: Tensor | None  # [sequences + 1]
    seq_idx: Tensor | None

    @property
    def total(self) -> int:
        return self.batch * self.length


def _flat(tensor: Tensor) -> Tensor:
    """[B, T, heads, dim] whose rows follow one another with one stride a token and a dense last dimension; a copy only where needed."""
    batch, length = tensor.shape[:2]
    dense = tensor.dim() == 3 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    follows = batch == 1 or tensor.stride(0) == length * tensor.stride(1)
    return tensor if dense and follows else tensor.contiguous()


def _document_table(cu_seqlens: Tensor, total: int, chunk: int) -> tuple[Tensor, Tensor, int]:
    """Chunks that start with their document: [chunks, 2] and [documents + 1], without asking the GPU for a length."""
    documents = cu_seqlens.numel() - 1
    chunks = total // chunk + documents
    cu_seqlens = cu_seqlens.long()
    counts = (cu_seqlens.diff() + chunk - 1) // chunk
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    index = torch.arange(chunks, device=cu_seqlens.device)
    document = (torch.searchsorted(offsets, index, right=True) - 1).clamp(max=documents - 1)
    start = cu_seqlens[document] + (index - offsets[document]) * chunk
    length = (cu_seqlens[document + 1] - start).clamp(0, chunk)
    return torch.stack([start, length], 1).int().contiguous(), offsets.int(), chunks


def _plan(x: Tensor, B: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None, own_states: bool) -> Plan:
    batch, length, heads, dim = x.shape
    groups, state = B.shape[2:]
    config = config_for(dim, state, x.dtype)
    table = sequence_chunks = None
    if cu_seqlens is not None and own_states:
        table, sequence_chunks, chunks = _document_table(cu_seqlens, batch * length, config.chunk)
        sequences, row_chunks = cu_seqlens.numel() - 1, chunks
    else:
        row_chunks = triton.cdiv(length, config.chunk)
        sequences, chunks = batch, batch * row_chunks
        if cu_seqlens is not None:
            tokens = torch.arange(batch * length, device=x.device, dtype=cu_seqlens.dtype)
            seq_idx = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True, out_int32=True)
    if seq_idx is not None:
        seq_idx = seq_idx.to(torch.int32).contiguous()
    return Plan(
        batch, length, heads, groups, dim, state, triton.cdiv(dim, config.block_p), chunks, sequences, row_chunks, config, table, sequence_chunks, seq_idx
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _pieces(plan: Plan, device: torch.device) -> int:
    """Into how many pieces a sequence is cut so that few, long sequences fill the GPU. A cut costs a second read of the values."""
    programs = plan.heads * plan.cuts * plan.sequences
    wanted = 2 * _processors(device)
    average = max(1, plan.chunks // plan.sequences)
    return 1 if programs >= wanted else max(1, min(triton.cdiv(2 * wanted, programs), average // 4))


def _splits(plan: Plan, rows: int, programs_wanted: int) -> int:
    """Into how many programs a group's heads are split."""
    base = plan.chunks * (plan.config.chunk // rows) * plan.groups
    return max(1, min(plan.heads * plan.cuts // plan.groups, programs_wanted // base))


def _decays(plan: Plan, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool, dt_min: float, dt_max: float) -> tuple[Tensor, ...]:
    """steps, centred, enter, leave [H, T]; carry, unsafe [chunks, H]."""
    steps, centred, enter, leave = torch.empty(4, plan.heads, plan.total, device=dt.device, dtype=torch.float32).unbind()
    carry = torch.empty(plan.chunks, plan.heads, device=dt.device, dtype=torch.float32)
    unsafe = torch.empty(plan.chunks, plan.heads, device=dt.device, dtype=torch.int32)
    block = 16
    decay_kernel[(plan.chunks, triton.cdiv(plan.heads, block))](
        dt, bias, A, plan.seq_idx, plan.table, steps, centred, enter, leave, carry, unsafe,
        plan.length, plan.row_chunks, plan.total, plan.heads, dt.stride(1), dt.stride(2), dt_min, dt_max,
        SOFTPLUS=softplus, HAS_BIAS=bias is not None, HAS_DOCS=plan.seq_idx is not None, TABLE=plan.table is not None,
        CHUNK=plan.config.chunk, BLOCK_H=block, num_warps=4,
    )  # fmt: skip
    return steps, centred, enter, leave, carry, unsafe


def _products(plan: Plan, B: Tensor, C: Tensor) -> Tensor:
    config = plan.config
    cb = torch.empty(plan.chunks, plan.groups, config.chunk, config.chunk, device=B.device, dtype=config.operand_dtype)
    product_kernel[(plan.chunks * plan.groups,)](
        B, C, plan.seq_idx, plan.table, cb, plan.length, plan.row_chunks, plan.groups, plan.state, B.stride(1), B.stride(2), C.stride(1), C.stride(2),
        HAS_DOCS=plan.seq_idx is not None, TABLE=plan.table is not None, CHUNK=config.chunk, BLOCK_N=config.block_n,
        OPERAND=config.operand, PRECISION=config.precision, WHOLE_N=plan.state == config.block_n, num_warps=8, num_stages=1,
    )  # fmt: skip
    return cb


def _carry_states(
    plan: Plan, value: Tensor, weight: Tensor, decay: Tensor, steps: Tensor, carry: Tensor, first: Tensor | None, want_last: bool,
    reverse: bool, forward_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """States before each chunk in walking order, the last state (fp32) and, in reverse, what flows through whole chunks."""
    config = plan.config
    virtual = plan.heads * plan.cuts
    tile = (config.block_p, config.block_n)
    device = value.device
    states = torch.empty(plan.chunks, virtual, *tile, device=device, dtype=config.operand_dtype)
    last = torch.empty(plan.sequences, plan.heads, plan.dim, plan.state, device=device, dtype=torch.float32) if want_last else None
    through = torch.empty(plan.chunks, virtual, config.block_p, device=device, dtype=torch.float32) if forward_states is not None else None
    pieces = _pieces(plan, device)
    piece_states = piece_decay = None
    if pieces > 1:
        piece_states = torch.empty(plan.sequences, virtual, pieces, *tile, device=device, dtype=torch.float32)
        piece_decay = torch.empty(plan.sequences, virtual, pieces, device=device, dtype=torch.float32)
    for totals in (True, False) if pieces > 1 else (False,):
        state_kernel[(virtual, plan.sequences * pieces)](
            value, weight, decay, steps, carry, plan.sequence_chunks, plan.table, states, forward_states, through, first, last, piece_states, piece_decay,
            plan.length, plan.row_chunks, plan.total, pieces, plan.heads, plan.groups, plan.dim, plan.state,
            value.stride(1), value.stride(2), weight.stride(1), weight.stride(2),
            REVERSE=reverse, TOTALS=totals, PIECES=pieces > 1, HAS_FIRST=first is not None, HAS_LAST=want_last, THROUGH=through is not None and not totals,
            TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk, BLOCK_P=config.block_p, BLOCK_N=config.block_n,
            OPERAND=config.operand, PRECISION=config.precision, WHOLE_P=plan.dim % config.block_p == 0, WHOLE_N=plan.state == config.block_n,
            **config.state,
        )  # fmt: skip
    return states, last, through


def _scan(
    plan: Plan, value: Tensor, weight: Tensor, states: Tensor, cb: Tensor, steps: Tensor, centred: Tensor, edge: Tensor, unsafe: Tensor, skip: Tensor | None,
    reverse: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    config = plan.config
    out = torch.empty(plan.batch, plan.length, plan.heads, plan.dim, device=value.device, dtype=dtype)
    options = dict(config.scan)
    splits = _splits(plan, options["ROWS"], options.pop("waves") * _processors(value.device))
    scan_kernel[(plan.chunks * (config.chunk // options["ROWS"]) * plan.groups * splits,)](
        value, weight, states, cb, steps, centred, edge, unsafe, skip, plan.table, out,
        plan.length, plan.row_chunks, plan.total, plan.heads, plan.groups, plan.dim, plan.state, splits,
        value.stride(1), value.stride(2), weight.stride(1), weight.stride(2),
        REVERSE=reverse, SKIP=0 if skip is None else skip.dim(), TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk,
        BLOCK_P=config.block_p, BLOCK_N=config.block_n, OPERAND=config.operand, PRECISION=config.precision,
        WHOLE_P=plan.dim % config.block_p == 0, WHOLE_N=plan.state == config.block_n, **options,
    )  # fmt: skip
    return out


def _projection_grad(
    plan: Plan, own: Tensor, across: Tensor, own_weight: Tensor, across_weight: Tensor, states: Tensor, cb: Tensor, steps: Tensor, centred: Tensor,
    edge: Tensor, unsafe: Tensor, reverse: bool, skip: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradient of C (or B in reverse), the row sums, the extra row sums and dD's partial sums (forward)."""
    config = plan.config
    device = own.device
    options = dict(config.grad)
    blocks = config.chunk // options["ROWS"]
    virtual = plan.heads * plan.cuts
    splits = _splits(plan, options["ROWS"], options.pop("waves") * _processors(device))
    shape = (plan.batch, plan.length, plan.groups, plan.state)
    out = torch.empty(splits, *shape, device=device, dtype=own_weight.dtype if splits == 1 else torch.float32)
    row_sums = torch.empty(virtual, plan.total, device=device, dtype=torch.float32)
    extra_sums = torch.empty_like(row_sums)
    skip_sums = torch.zeros(plan.chunks * blocks, virtual, device=device, dtype=torch.float32) if skip else None
    projection_grad_kernel[(plan.chunks * blocks * plan.groups * splits,)](
        own, across, own_weight, across_weight, states, cb, plan.seq_idx, steps, centred, edge, unsafe, plan.table, out, row_sums, extra_sums, skip_sums,
        plan.length, plan.row_chunks, plan.total, plan.heads, plan.groups, plan.dim, plan.state, splits,
        own.stride(1), own.stride(2), across.stride(1), across.stride(2), own_weight.stride(1), own_weight.stride(2), across_weight.stride(1),
        across_weight.stride(2),
        REVERSE=reverse, SKIP=skip, HAS_DOCS=plan.seq_idx is not None, TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk,
        BLOCK_P=config.block_p, BLOCK_N=config.block_n, OPERAND=config.operand, PRECISION=config.precision,
        WHOLE_P=plan.dim % config.block_p == 0, WHOLE_N=plan.state == config.block_n, **options,
    )  # fmt: skip
    grad = out[0] if splits == 1 else out.sum(0).to(own_weight.dtype)
    return grad, row_sums, extra_sums, skip_sums


def _gate(y: Tensor, z: Tensor, dout: Tensor | None) -> tuple[Tensor, Tensor]:
    """y silu(z), or with dout the gradients of y and z."""
    first, second = torch.empty_like(y), torch.empty_like(y if dout is not None else y[:0])
    size = y.numel()
    z = _flat(z)
    dout = None if dout is None else _flat(dout)
    o = (0, 0) if dout is None else dout.stride()[1:3]
    gate_kernel[(triton.cdiv(size, 4096),)](
        y, z, dout, first, second, size, y.shape[2], y.shape[3], z.stride(1), z.stride(2), *o, BLOCK=4096, BACKWARD=dout is not None, num_warps=8
    )
    return first, second


def _skip_grad(x: Tensor, dout: Tensor) -> Tensor:
    batch, length, heads, dim = x.shape
    tokens = 1024
    pieces = triton.cdiv(batch * length, tokens)
    partial = torch.empty(pieces, heads, dim, device=x.device, dtype=torch.float32)
    skip_grad_kernel[(pieces, heads)](
        x, dout, partial, batch * length, heads, dim, x.stride(1), x.stride(2), dout.stride(1), dout.stride(2),
        TOKENS=tokens, BLOCK=64, BLOCK_P=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return partial.sum(0)


@torch.library.custom_op("fast_llm_ssm::ssd_forward", mutates_args=())
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, initial_states: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, softplus: bool, dt_min: float, dt_max: float, want_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, final states (or empty), states at the chunks' starts, y before the gate (or empty)."""
    x, dt, B, C = _flat(x), _flat(dt), _flat(B), _flat(C)
    plan = _plan(x, B, seq_idx, cu_seqlens, initial_states is not None or want_final)
    steps, centred, enter, leave, carry, unsafe = _decays(plan, dt, A, dt_bias, softplus, dt_min, dt_max)
    cb = _products(plan, B, C)
    first = None if initial_states is None else initial_states.contiguous()
    states, last, _ = _carry_states(plan, x, B, leave, steps, carry, first, want_final, reverse=False)
    y = _scan(plan, x, C, states, cb, steps, centred, enter, unsafe, None if D is None else D.contiguous(), False, x.dtype)
    ungated = y.new_empty(0)
    if z is not None:
        ungated = y
        y, _ = _gate(ungated, z, None)
    return y, last if last is not None else y.new_empty(0, dtype=torch.float32), states, ungated


@_forward.register_fake
def _(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, softplus, dt_min, dt_max, want_final):
    batch, length, heads, dim = x.shape
    state = B.shape[3]
    config = config_for(dim, state, x.dtype)
    own = cu_seqlens is not None and (initial_states is not None or want_final)
    documents = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else 0
    chunks = batch * length // config.chunk + documents if own else batch * ((length + config.chunk - 1) // config.chunk)
    sequences = documents if own else batch
    cuts = (dim + config.block_p - 1) // config.block_p
    final = x.new_empty((sequences, heads, dim, state) if want_final else (0,), dtype=torch.float32)
    states = x.new_empty((chunks, heads * cuts, config.block_p, config.block_n), dtype=config.operand_dtype)
    return x.new_empty(x.shape), final, states, x.new_empty(x.shape if z is not None else (0,))


@torch.library.custom_op("fast_llm_ssm::ssd_backward", mutates_args=())
def _backward(
    dout: Tensor, dfinal: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    initial_states: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None, states: Tensor, ungated: Tensor, softplus: bool, dt_min: float,
    dt_max: float, had_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, dt, A, B, C, D, z, dt_bias, initial_states; empty where the input is absent."""
    x, dt, B, C = _flat(x), _flat(dt), _flat(B), _flat(C)
    dz = x.new_empty(0)
    if z is not None:
        dout, dz = _gate(ungated, z, dout)
    dout = _flat(dout)
    plan = _plan(x, B, seq_idx, cu_seqlens, initial_states is not None or had_final)
    config = plan.config
    steps, centred, enter, leave, carry, unsafe = _decays(plan, dt, A, dt_bias, softplus, dt_min, dt_max)
    cb = _products(plan, B, C)
    dfinal = None if dfinal is None else dfinal.contiguous()
    state_grads, dinitial, through = _carry_states(plan, dout, C, enter, steps, carry, dfinal, initial_states is not None, True, states)
    assert through is not None
    dx = _scan(plan, dout, B, state_grads, cb, steps, centred, leave, unsafe, None if D is None else D.contiguous(), True, x.dtype)
    per_head = D is not None and D.dim() == 1
    dC, rows_c, self_sums, skip_sums = _projection_grad(plan, dout, x, C, B, states, cb, steps, centred, enter, unsafe, False, per_head)
    dB, rows_b, edge_sums, _ = _projection_grad(plan, x, dout, B, C, state_grads, cb, steps, centred, leave, unsafe, True, False)
    ddt = torch.empty(dt.shape, device=dt.device, dtype=dt.dtype)
    dA = torch.empty(plan.chunks, plan.heads, device=dt.device, dtype=torch.float32)
    dbias = torch.empty_like(dA) if dt_bias is not None else None
    block = 16
    step_grad_kernel[(plan.chunks, triton.cdiv(plan.heads, block))](
        dt, dt_bias, A, plan.seq_idx, plan.table, steps, rows_c, rows_b, self_sums, edge_sums, through, ddt, dA, dbias,
        plan.length, plan.row_chunks, plan.total, plan.heads, dt.stride(1), dt.stride(2), dt_min, dt_max,
        SOFTPLUS=softplus, HAS_BIAS=dt_bias is not None, HAS_DOCS=plan.seq_idx is not None, TABLE=plan.table is not None, CHUNK=config.chunk,
        BLOCK_H=block, CUTS=plan.cuts, BLOCK_P=config.block_p, num_warps=4,
    )  # fmt: skip
    dD = x.new_empty(0)
    if D is not None and per_head:
        assert skip_sums is not None
        dD = skip_sums.sum(0).view(plan.heads, plan.cuts).sum(1).to(D.dtype)
    elif D is not None:
        dD = _skip_grad(x, dout).to(D.dtype)
    return (
        dx, ddt, dA.sum(0).to(A.dtype), dB, dC, dD, dz,
        x.new_empty(0) if dt_bias is None or dbias is None else dbias.sum(0).to(dt_bias.dtype),
        x.new_empty(0) if initial_states is None or dinitial is None else dinitial.to(initial_states.dtype),
    )  # fmt: skip


@_backward.register_fake
def _(dout, dfinal, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, states, ungated, softplus, dt_min, dt_max, had_final):
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
        dout, dfinal if want_final else None, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, states, ungated, softplus, dt_min, dt_max,
        want_final,
    )  # fmt: skip
    present = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    return *(grad if tensor is not None else None for grad, tensor in zip(grads, present, strict=True)), *(None,) * 6


_forward.register_autograd(_autograd, setup_context=_setup_context)


def unsupported(
    op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,
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
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """As `ops.ssd`. The chunk size is chosen by the kernels; the result does not depend on it."""
    y, final, _, _ = _forward(
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, float(dt_limit[0]), float(dt_limit[1]), return_final_states
    )
    return (y, final) if return_final_states else y


__all__ = ["ssd", "unsupported"]
