"""Causal attention on PyTorch's own: scaled_dot_product_attention, and its variable-length kernel on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fast_llm_ssm.ops import documents
from fast_llm_ssm.ops.attention import varlen

_QUERY_BLOCK = 512


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    prefix: int = 0,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The reference of `fast_llm_ssm.ops.attention`, which see."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if positions is not None:
        return _on_cache(q, k, v, scale, window, prefix, positions)
    if cu_seqlens is None or q.is_meta:
        return _rows(q, k, v, scale, window, prefix)
    if varlen.can_run(q, v, prefix):
        return varlen.attention(q, k, v, scale, window, cu_seqlens)
    packed = documents.from_cu_seqlens(cu_seqlens, q.shape[0] * q.shape[1])
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    outputs, order = [], []
    for bucket in documents.buckets(packed, q.device):
        shape = bucket.tokens.shape
        # Padding comes last in its row, where causality hides it.
        q_rows, k_rows, v_rows = (t.index_select(0, bucket.tokens.flatten()).unflatten(0, shape) for t in flat)
        outputs.append(_rows(q_rows, k_rows, v_rows, scale, window, prefix)[bucket.valid])
        order.append(bucket.tokens[bucket.valid])
    y = torch.cat(outputs).index_select(0, torch.cat(order).argsort())
    return y.unflatten(0, q.shape[:2])


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, prefix: int) -> Tensor:
    """One document a row, queries and keys at the same positions."""
    length = q.shape[1]
    if window is None or window >= length:
        return _sdpa(q, k, v, scale, causal=True)
    block = max(window, _QUERY_BLOCK)
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        near = max(start - window + 1, 0)
        ahead = min(prefix, near)  # prefix keys that the near ones do not hold
        keys, values = k[:, near:end], v[:, near:end]
        if ahead:
            keys, values = torch.cat([k[:, :ahead], keys], 1), torch.cat([v[:, :ahead], values], 1)
        places = torch.cat([torch.arange(ahead, device=q.device), torch.arange(near, end, device=q.device)])
        mask = _visible(torch.arange(start, end, device=q.device), places, window, prefix)
        outputs.append(_sdpa(q[:, start:end], keys, values, scale, mask=mask))
    return torch.cat(outputs, dim=1)


def _on_cache(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, prefix: int, positions: Tensor
) -> Tensor:
    places = torch.arange(k.shape[1], device=q.device)
    outputs = []
    for start in range(0, q.shape[1], _QUERY_BLOCK):
        span = slice(start, start + _QUERY_BLOCK)
        mask = _visible(positions[:, span], places, window, prefix)[:, None]  # [B, 1, T, S]
        y = _sdpa(q[:, span], k, v, scale, mask=mask)
        outputs.append(y.where(positions[:, span, None, None] >= 0, 0))
    return torch.cat(outputs, dim=1)


def _visible(queries: Tensor, keys: Tensor, window: int | None, prefix: int) -> Tensor:
    """Whether a query at position [..., T] sees a key at position [S]: [..., T, S] bool."""
    distance = queries[..., None] - keys
    visible = distance >= 0
    return visible if window is None else visible & ((distance < window) | (keys < prefix))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """PyTorch's attention on [B, T, H, D] tensors. Unequal widths are padded with zeros: its fused kernels want equal
    ones.
    """
    width, value_width = q.shape[-1], v.shape[-1]
    if width < value_width:
        q, k = F.pad(q, (0, value_width - width)), F.pad(k, (0, value_width - width))
    elif value_width < width:
        v = F.pad(v, (0, width - value_width))
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)[..., :value_width]
