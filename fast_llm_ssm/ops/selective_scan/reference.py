"""The selective scan in plain PyTorch: the definition, token by token, and a chunked form."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK = 32
"""Tokens whose [B, chunk, K, N] states exist at a time: memory stays linear in B T K."""

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    return_last_state: bool,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    scan: Scan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference of `fast_llm_ssm.ops.selective_scan`, which see; `scan` may be `recurrence`, the definition."""
    scan = scan or _chunks
    dtype = torch.promote_types(u.dtype, torch.float32)
    x, step = u.to(dtype).transpose(1, 2), delta.to(dtype).transpose(1, 2)  # [B, T, K]
    if delta_bias is not None:
        step = step + delta_bias.to(dtype)
    if delta_softplus:
        step = F.softplus(step)
    b, c = (t.to(dtype).permute(0, 3, 1, 2) for t in (B, C))  # [B, T, G, N]
    if B.shape[1] > 1:
        b, c = (t.repeat_interleave(u.shape[1] // B.shape[1], 2) for t in (b, c))  # one group broadcasts
    states = len(u) if cu_seqlens is None else len(cu_seqlens) - 1
    state = x.new_zeros(states, *A.shape) if initial_states is None else initial_states.to(dtype)
    A = A.to(dtype)
    if cu_seqlens is None:
        begins = None
        if seq_idx is not None:
            if not seq_idx.is_cuda and bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
                raise ValueError("selective_scan: seq_idx must not decrease along a row")
            begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))  # a row's first token continues the given state
        y, last = scan(x, step, A, b, c, state, begins)
    else:
        bounds = cu_seqlens.tolist()
        parts = []
        for i, (first, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            span = slice(first, end)
            parts.append(scan(x[:, span], step[:, span], A, b[:, span], c[:, span], state[i : i + 1], None))
        y, last = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    if D is not None:
        y = y + x * D.to(dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype)).transpose(1, 2)
    y = y.transpose(1, 2).to(u.dtype)
    return (y, last) if return_last_state else y


def _chunks(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    ys = []
    for start in range(0, x.shape[1], _CHUNK):
        span = slice(start, start + _CHUNK)
        inputs = (x[:, span], step[:, span], A, B[:, span], C[:, span], state)
        marks = None if begins is None else begins[:, span]
        if torch.is_grad_enabled():
            y, state = checkpoint(_chunk, *inputs, marks, use_reentrant=False, preserve_rng_state=False)
        else:
            y, state = _chunk(*inputs, marks)
        ys.append(y)
    return (torch.cat(ys, 1) if ys else x), state


def _chunk(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Hillis and Steele's scan: after round r each token holds the sum over the 2^r tokens up to it, and their decay.
    Only products of decays are taken, all at most 1, so nothing overflows.
    """
    decay = (step[..., None] * A).exp()  # [B, L, K, N]
    if begins is not None:
        decay = decay.masked_fill(begins[..., None, None], 0.0)  # nothing of the document before remains
    h = (step * x)[..., None] * B
    h = torch.cat([h[:, :1] + decay[:, :1] * state[:, None], h[:, 1:]], 1)
    reach = 1
    while reach < h.shape[1]:
        h = torch.cat([h[:, :reach], h[:, reach:] + decay[:, reach:] * h[:, :-reach]], 1)
        decay = torch.cat([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], 1)
        reach *= 2
    return (h * C).sum(-1), h[:, -1]


def recurrence(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other."""
    ys = []
    for t in range(x.shape[1]):
        if begins is not None:
            state = state.masked_fill(begins[:, t, None, None], 0.0)
        state = (step[:, t, :, None] * A).exp() * state + (step[:, t] * x[:, t])[..., None] * B[:, t]
        ys.append((state * C[:, t]).sum(-1))
    return (torch.stack(ys, 1) if ys else x), state
