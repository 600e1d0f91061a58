"""Packed documents on a GPU: PyTorch's variable-length flash attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDEST = 256
"""Head dimension up to which flash attention works."""


def can_run(q: Tensor, v: Tensor, prefix: int) -> bool:
    """Whether the kernel takes these: half precision on a GPU, and no keys that every query sees."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and half and prefix == 0 and max(q.shape[-1], v.shape[-1]) <= _WIDEST


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor) -> Tensor:
    """As `fast_llm_ssm.ops.attention` with documents; nothing here waits for the GPU."""
    from torch.nn.attention.varlen import varlen_attn  # brings torch.compile along: half of all import time

    batch, length, heads, width = q.shape
    value_width = v.shape[-1]
    if width != value_width:  # the kernel wants equal widths
        wide = max(width, value_width)
        q, k, v = (F.pad(t, (0, wide - t.shape[-1])) for t in (q, k, v))
    if k.shape[2] != heads:
        k, v = (t.repeat_interleave(heads // k.shape[2], dim=2) for t in (k, v))
    bounds = cu_seqlens.to(torch.int32)
    y = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        length,  # a document fits a row
        length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(y, Tensor)
    return y.unflatten(0, (batch, length))[..., :value_width]
