"""The plan of an SSD call and the launches of its Triton kernels. The legend is in triton_decay.py."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fast_llm_ssm.ops.ssd.triton_config import Config, config_for
from fast_llm_ssm.ops.ssd.triton_decay import decay_kernel, gate_kernel, skip_grad_kernel
from fast_llm_ssm.ops.ssd.triton_grad import edge_grad_kernel, pair_grad_kernel
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


class Decays(NamedTuple):
    """Steps and decays, fp32 [H, T] unless said otherwise; the legend in triton_decay.py explains them."""

    steps: Tensor
    centred: Tensor
    up: Tensor
    down: Tensor
    enter: Tensor
    leave: Tensor
    carry: Tensor  # [chunks, H]
    unsafe: Tensor  # int32 [chunks, H]


def flat(tensor: Tensor) -> Tensor:
    """[B, T, heads, dim] whose rows follow one another with one stride a token and a dense last dimension; a copy
    only where needed."""
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


def plan(x: Tensor, B: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None, own_states: bool) -> Plan:
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
        batch,
        length,
        heads,
        groups,
        dim,
        state,
        triton.cdiv(dim, config.block_p),
        chunks,
        sequences,
        row_chunks,
        config,
        table,
        sequence_chunks,
        seq_idx,
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _pieces(plan: Plan, device: torch.device) -> int:
    """Into how many pieces a sequence is cut so that few, long sequences fill the GPU. A cut costs a second read of
    the values."""
    programs = plan.heads * plan.cuts * plan.sequences
    wanted = 2 * _processors(device)
    average = max(1, plan.chunks // plan.sequences)
    return 1 if programs >= wanted else max(1, min(triton.cdiv(2 * wanted, programs), average // 4))


def _splits(plan: Plan, programs: int, wanted: int) -> int:
    """Into how many programs a group's heads are split, when without a split there would be `programs`."""
    return max(1, min(plan.heads * plan.cuts // plan.groups, wanted // programs))


def decays(
    plan: Plan, dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool, dt_min: float, dt_max: float
) -> Decays:
    """What triton_decay.py's legend names: [H, T], and carry and unsafe [chunks, H]."""
    steps, centred, up, down, enter, leave = torch.empty(
        6, plan.heads, plan.total, device=dt.device, dtype=torch.float32
    ).unbind()
    carry = torch.empty(plan.chunks, plan.heads, device=dt.device, dtype=torch.float32)
    unsafe = torch.empty(plan.chunks, plan.heads, device=dt.device, dtype=torch.int32)
    block = 16
    decay_kernel[(plan.chunks, triton.cdiv(plan.heads, block))](
        dt, bias, A, plan.seq_idx, plan.table, steps, centred, up, down, enter, leave, carry, unsafe,
        plan.length, plan.row_chunks, plan.total, plan.heads, dt.stride(1), dt.stride(2), dt_min, dt_max,
        SOFTPLUS=softplus, HAS_BIAS=bias is not None, HAS_DOCS=plan.seq_idx is not None, TABLE=plan.table is not None,
        CHUNK=plan.config.chunk, BLOCK_H=block, num_warps=4,
    )  # fmt: skip
    return Decays(steps, centred, up, down, enter, leave, carry, unsafe)


def carry_states(
    plan: Plan, value: Tensor, weight: Tensor, decays: Decays, first: Tensor | None, want_last: bool, reverse: bool,
    forward_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """States before each chunk in walking order, the last state (fp32) and, in reverse, what flows through whole
    chunks."""
    config = plan.config
    virtual = plan.heads * plan.cuts
    tile = (config.block_p, config.block_n)
    device = value.device
    states = torch.empty(plan.chunks, virtual, *tile, device=device, dtype=config.operand_dtype)
    last = (
        torch.empty(plan.sequences, plan.heads, plan.dim, plan.state, device=device, dtype=torch.float32)
        if want_last
        else None
    )
    through = (
        torch.empty(plan.chunks, virtual, config.block_p, device=device, dtype=torch.float32)
        if forward_states is not None
        else None
    )
    pieces = _pieces(plan, device)
    piece_states = piece_decay = None
    if pieces > 1:
        piece_states = torch.empty(plan.sequences, virtual, pieces, *tile, device=device, dtype=torch.float32)
        piece_decay = torch.empty(plan.sequences, virtual, pieces, device=device, dtype=torch.float32)
    for totals in (True, False) if pieces > 1 else (False,):
        state_kernel[(virtual, plan.sequences * pieces)](
            value, weight, decays.enter if reverse else decays.leave, decays.steps, decays.carry,
            plan.sequence_chunks, plan.table, states, forward_states, through, first, last, piece_states, piece_decay,
            plan.length, plan.row_chunks, plan.total, pieces, plan.heads, plan.groups, plan.dim, plan.state,
            value.stride(1), value.stride(2), weight.stride(1), weight.stride(2),
            REVERSE=reverse, TOTALS=totals, PIECES=pieces > 1, HAS_FIRST=first is not None, HAS_LAST=want_last,
            THROUGH=through is not None and not totals,
            TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk, BLOCK_P=config.block_p,
            BLOCK_N=config.block_n,
            OPERAND=config.operand, PRECISION=config.precision, WHOLE_P=plan.dim % config.block_p == 0,
            WHOLE_N=plan.state == config.block_n,
            **config.state,
        )  # fmt: skip
    return states, last, through


def scan(
    plan: Plan, value: Tensor, weight: Tensor, other_weight: Tensor, states: Tensor, decays: Decays,
    skip: Tensor | None, reverse: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    config = plan.config
    out = torch.empty(plan.batch, plan.length, plan.heads, plan.dim, device=value.device, dtype=dtype)
    options = dict(config.scan)
    splits = _splits(
        plan,
        plan.chunks * (config.chunk // options["ROWS"]) * plan.groups,
        options.pop("waves") * _processors(value.device),
    )
    for unsafe_ones in (False, True):
        scan_kernel[(plan.chunks * (config.chunk // options["ROWS"]) * plan.groups * splits,)](
            value, weight, other_weight, plan.seq_idx, states, decays.steps, decays.centred, decays.up, decays.down,
            decays.leave if reverse else decays.enter, decays.unsafe, skip, plan.table, out,
            plan.length, plan.row_chunks, plan.total, plan.heads, plan.groups, plan.dim, plan.state, splits,
            value.stride(1), value.stride(2), weight.stride(1), weight.stride(2), other_weight.stride(1),
            other_weight.stride(2),
            REVERSE=reverse, HAS_DOCS=plan.seq_idx is not None, SKIP=0 if skip is None else skip.dim(),
            TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk,
            BLOCK_P=config.block_p, BLOCK_N=config.block_n, OPERAND=config.operand, PRECISION=config.precision,
            WHOLE_P=plan.dim % config.block_p == 0, WHOLE_N=plan.state == config.block_n, ASM=config.asm,
            UNSAFE=unsafe_ones, LOOK=64, **options,
        )  # fmt: skip
    return out


def pair_grad(
    plan: Plan, dout: Tensor, x: Tensor, B: Tensor, C: Tensor, decays: Decays
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per group the gradient of the C B^T tiles before their decay; per head its row and column sums; q_ii and (C
    B^T)_ii."""
    config = plan.config
    device = x.device
    options = dict(config.pair)
    blocks = config.chunk // options["ROWS"]
    virtual = plan.heads * plan.cuts
    tiles = blocks * (blocks + 1) // 2
    splits = _splits(plan, plan.chunks * tiles * plan.groups, options.pop("waves") * _processors(device))
    pair_grad = torch.empty(
        splits, plan.chunks, plan.groups, config.chunk, config.chunk, device=device, dtype=torch.float32
    )
    row_sums, col_sums = torch.empty(2, blocks, virtual, plan.total, device=device, dtype=torch.float32).unbind()
    self_dots = torch.empty(virtual, plan.total, device=device, dtype=torch.float32)
    self_pairs = torch.empty(plan.groups, plan.total, device=device, dtype=torch.float32)
    for unsafe_ones in (False, True):
        pair_grad_kernel[(plan.chunks * tiles * plan.groups * splits,)](
            dout, x, B, C, plan.seq_idx, decays.steps, decays.centred, decays.up, decays.down, decays.unsafe,
            plan.table, pair_grad, row_sums, col_sums, self_dots, self_pairs,
            plan.length, plan.row_chunks, plan.total, plan.heads, plan.groups, plan.dim, plan.state, splits,
            dout.stride(1), dout.stride(2),
            x.stride(1), x.stride(2), B.stride(1), B.stride(2), C.stride(1), C.stride(2),
            HAS_DOCS=plan.seq_idx is not None, TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk,
            BLOCK_P=config.block_p, BLOCK_N=config.block_n,
            OPERAND=config.operand, PRECISION=config.precision, WHOLE_P=plan.dim % config.block_p == 0,
            WHOLE_N=plan.state == config.block_n, ASM=config.asm, UNSAFE=unsafe_ones, LOOK=64, **options,
        )  # fmt: skip
    return pair_grad, row_sums, col_sums, self_dots, self_pairs


def edge_grad(
    plan: Plan,
    own: Tensor,
    own_weight: Tensor,
    across_weight: Tensor,
    states: Tensor,
    pair_grad: Tensor,
    decays: Decays,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of C (of B in reverse) and the row sums of what crosses the chunk's edge."""
    config = plan.config
    options = dict(config.edge)
    blocks = config.chunk // options["ROWS"]
    virtual = plan.heads * plan.cuts
    splits = _splits(plan, plan.chunks * blocks * plan.groups, options.pop("waves") * _processors(own.device))
    shape = (splits, plan.batch, plan.length, plan.groups, plan.state)
    out = torch.empty(shape, device=own.device, dtype=own_weight.dtype if splits == 1 else torch.float32)
    edge_sums = torch.empty(virtual, plan.total, device=own.device, dtype=torch.float32)
    edge_grad_kernel[(plan.chunks * blocks * plan.groups * splits,)](
        own, own_weight, across_weight, states, pair_grad, decays.steps, decays.leave if reverse else decays.enter,
        plan.table, out, edge_sums,
        plan.length, plan.row_chunks, plan.total, plan.heads, plan.groups, plan.dim, plan.state, splits,
        pair_grad.shape[0],
        own.stride(1), own.stride(2), own_weight.stride(1), own_weight.stride(2), across_weight.stride(1),
        across_weight.stride(2),
        REVERSE=reverse, TABLE=plan.table is not None, CUTS=plan.cuts, CHUNK=config.chunk, BLOCK_P=config.block_p,
        BLOCK_N=config.block_n,
        OPERAND=config.operand, PRECISION=config.precision, WHOLE_P=plan.dim % config.block_p == 0,
        WHOLE_N=plan.state == config.block_n,
        ASM=config.asm, **options,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0).to(own_weight.dtype), edge_sums


def gate(y: Tensor, z: Tensor, dout: Tensor | None) -> tuple[Tensor, Tensor]:
    """y silu(z), or with dout the gradients of y and z."""
    first, second = torch.empty_like(y), torch.empty_like(y if dout is not None else y[:0])
    size = y.numel()
    z = flat(z)
    dout = None if dout is None else flat(dout)
    o = (0, 0) if dout is None else dout.stride()[1:3]
    gate_kernel[(triton.cdiv(size, 4096),)](
        y,
        z,
        dout,
        first,
        second,
        size,
        y.shape[2],
        y.shape[3],
        z.stride(1),
        z.stride(2),
        *o,
        BLOCK=4096,
        BACKWARD=dout is not None,
        num_warps=8,
    )
    return first, second


def skip_grad(x: Tensor, dout: Tensor) -> Tensor:
    batch, length, heads, dim = x.shape
    tokens = 1024
    pieces = triton.cdiv(batch * length, tokens)
    partial = torch.empty(pieces, heads, dim, device=x.device, dtype=torch.float32)
    skip_grad_kernel[(pieces, heads)](
        x, dout, partial, batch * length, heads, dim, x.stride(1), x.stride(2), dout.stride(1), dout.stride(2),
        TOKENS=tokens, BLOCK=64, BLOCK_P=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return partial.sum(0)
