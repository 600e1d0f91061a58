"""SSD in plain PyTorch: steps, documents, skip and gate around the chunked scan."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fast_llm_ssm.ops import documents
from fast_llm_ssm.ops.documents import Documents
from fast_llm_ssm.ops.ssd.scan import scan

# Work inside a chunk grows with its square; longer ones only cost time here.
_LONGEST_CHUNK = 64


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference of `fast_llm_ssm.ops.ssd`, which see. Computes in fp64 if an input is fp64, else in fp32; memory
    is linear in T.
    """
    batch, length, heads, dim = x.shape
    dtype = torch.float32
    for tensor in (x, dt, A, B, C, initial_states):
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    num_states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_states is None:
        states = x.new_zeros(num_states, heads, dim, B.shape[3], dtype=dtype)
    else:
        states = initial_states.to(dtype)
    chunk_size = min(chunk_size, _LONGEST_CHUNK)
    dt, A = apply_dt(dt.to(dtype), dt_bias, dt_softplus, dt_limit), A.to(dtype)

    if (seq_idx is None and cu_seqlens is None) or x.is_meta:
        y, states = scan(x, dt, A, B, C, D, states, chunk_size)
    elif cu_seqlens is not None:
        packed = documents.from_cu_seqlens(cu_seqlens, length)
        y, states = _scan_documents(x, dt, A, B, C, D, states, chunk_size, packed)
    else:
        assert seq_idx is not None
        packed = documents.from_seq_idx(seq_idx)
        first, last = packed.first.to(x.device), packed.last.to(x.device)
        per_document = states.new_zeros(len(packed.starts), *states.shape[1:]).index_copy(0, first, states)
        y, per_document = _scan_documents(x, dt, A, B, C, D, per_document, chunk_size, packed)
        states = per_document[last]

    if z is not None:
        y = y * F.silu(z.to(dtype))
    y = y.to(x.dtype)
    return (y, states) if return_final_states else y


def apply_dt(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]) -> Tensor:
    """The step as it is applied: clamp(softplus(dt + dt_bias), *dt_limit), in dt's dtype. The bias broadcasts against
    dt's last dimensions.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return dt.clamp(*dt_limit)


def _scan_documents(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    states: Tensor,
    chunk_size: int,
    packed: Documents,
) -> tuple[Tensor, Tensor]:
    """Scan each document apart, those of similar length together. `states` and the returned states are [documents, H,
    P, N].
    """
    flat = [tensor.flatten(0, 1) for tensor in (x, dt, B, C)]
    outputs, order = [], []
    final = states
    for bucket in documents.buckets(packed, x.device):
        shape = bucket.tokens.shape
        x_rows, dt_rows, B_rows, C_rows = (t.index_select(0, bucket.tokens.flatten()).unflatten(0, shape) for t in flat)
        dt_rows = dt_rows.masked_fill(~bucket.valid[..., None], 0)  # a step of 0 leaves the state as it is
        y, state = scan(x_rows, dt_rows, A, B_rows, C_rows, D, states[bucket.documents], chunk_size)
        outputs.append(y[bucket.valid])
        order.append(bucket.tokens[bucket.valid])
        final = final.index_copy(0, bucket.documents, state)
    y = torch.cat(outputs).index_select(0, torch.cat(order).argsort()) if outputs else x.flatten(0, 1)
    return y.unflatten(0, x.shape[:2]), final
