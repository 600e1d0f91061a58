"""Which document and position each token of a batch belongs to: worked out once a forward pass, read by every mixer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KVSlot:
    """Hands keys and values from one attention to the later ones that reuse them, within one layer's pass.

    They are [B, T, heads, size], positions applied; or, while decoding, the caches of the layer that owns them.
    """

    kv: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Layout:
    """The tokens of one batch.

    Attributes:
        dtype: of the activations that mixers see and return.
        positions: [B, T] int64, position of each token in its document.
        seq_idx: [B, T] int32, number of the document of each token, non-decreasing; None if every row is one document.
        cu_seqlens: [documents + 1] int32 over the flattened B * T tokens, row ends included; None likewise.
        rows: only for prefill, where the real tokens of all rows stand packed in one row: [T] int64, the row of the
            decoding state that each token continues. Document r is then row r of the state, and may be empty.
        kv: where attention finds the keys and values that it reuses and leaves its own; None in models without reuse.
    """

    dtype: torch.dtype
    positions: Tensor
    seq_idx: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rows: Tensor | None = None
    kv: KVSlot | None = None


def plain_layout(batch_size: int, length: int, dtype: torch.dtype, device: torch.device) -> Layout:
    """Every row is one document."""
    positions = torch.arange(length, device=device).expand(batch_size, length)
    return Layout(dtype, positions)


def document_layout(cu_seqlens: Tensor, batch_size: int, length: int, dtype: torch.dtype) -> Layout:
    """Rows hold several documents.

    Args:
        cu_seqlens: [documents + 1] integers over the flattened batch_size * length tokens, row ends included.

    Raises:
        ValueError: `cu_seqlens` on the CPU that does not rise from 0 to the token count through every row end.
            On a GPU nothing is checked, since that would synchronise.
    """
    total = batch_size * length
    if cu_seqlens.device.type == "cpu":
        _check_boundaries(cu_seqlens, batch_size, length)
    cu_seqlens = cu_seqlens.to(torch.int32)
    token = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=True)
    positions = (token - cu_seqlens[document]).long()
    return Layout(dtype, positions.view(batch_size, length), document.view(batch_size, length), cu_seqlens)


def prefill_layout(counts: Tensor, lengths: Tensor, dtype: torch.dtype) -> Layout:
    """The real tokens of several rows, packed into one.

    Args:
        counts: [B] int64, new tokens of each row; zero is allowed.
        lengths: [B] int64, tokens that each row's state holds already.
    """
    ends = counts.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    offset = torch.arange(rows.shape[0], device=counts.device) - (ends - counts)[rows]
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    return Layout(dtype, (lengths[rows] + offset)[None], rows[None].to(torch.int32), cu_seqlens, rows)


def _check_boundaries(cu_seqlens: Tensor, batch_size: int, length: int) -> None:
    total = batch_size * length
    bounds = cu_seqlens.tolist()
    if cu_seqlens.dim() != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(f"cu_seqlens is {_short(bounds)}, expected one dimension that rises from 0 to {total}")
    if any(b < a for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"cu_seqlens falls: {_short(bounds)}")
    missing = set(range(length, total, length)) - set(bounds)
    if missing:
        raise ValueError(f"cu_seqlens lacks the row end {min(missing)}: a document can't run on into the next row")


def _short(values: object) -> str:
    text = str(values)
    return text if len(text) < 80 else text[:76] + " ..."
