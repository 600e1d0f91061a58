"""Documents inside packed rows: where they begin and end, and their tokens as padded batches."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Consecutive documents over the flattened B*T tokens. All tensors are int64 and on the CPU."""

    starts: Tensor  # [documents]
    lengths: Tensor  # [documents], zero is allowed
    first: Tensor  # [B], the first document of each row
    last: Tensor  # [B], the last document of each row


class Bucket(NamedTuple):
    """Documents of similar length, as one padded batch."""

    documents: Tensor  # [n], which documents
    tokens: Tensor  # [n, longest], flat index of each token; padding repeats the document's first token
    valid: Tensor  # [n, longest] bool, False at padding


def whole_rows(rows: int, length: int) -> Documents:
    """One document a row."""
    row = torch.arange(rows)
    return Documents(row * length, torch.full_like(row, length), row, row)


def from_seq_idx(seq_idx: Tensor) -> Documents:
    """Documents from a number for each token, [B, T]: a new one starts wherever the number changes, and at each row's
    first token.

    Raises:
        ValueError: the numbers fall inside a row.
    """
    rows, length = seq_idx.shape
    numbers = seq_idx.cpu()
    steps = numbers[:, 1:] - numbers[:, :-1]
    if (steps < 0).any():
        raise ValueError("seq_idx must not decrease along a row")
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = steps != 0
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([rows * length])])
    counts = begins.sum(1).cumsum(0)
    return Documents(starts, ends - starts, counts - begins.sum(1), counts - 1)


def from_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> Documents:
    """Documents from cumulative lengths, [documents + 1], over `num_tokens` tokens in one row.

    Raises:
        ValueError: they do not begin with 0, fall somewhere, or do not end with `num_tokens`.
    """
    bounds = cu_seqlens.cpu().long()
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens must run from 0 to the number of tokens, {num_tokens}; got {bounds[0]} to {bounds[-1]}"
        )
    lengths = bounds.diff()
    if (lengths < 0).any():
        raise ValueError("cu_seqlens must not decrease")
    first = torch.zeros(1, dtype=torch.long)
    return Documents(bounds[:-1], lengths, first, first + len(lengths) - 1)


def buckets(documents: Documents, device: torch.device, smallest: int = 16) -> Iterator[Bucket]:
    """Groups documents whose lengths lie between the same powers of two, so that padding less than doubles the work.
    Leaves empty documents out.
    """
    sizes = documents.lengths.clamp(min=smallest)
    keys = (sizes - 1).double().log2().floor().masked_fill(documents.lengths == 0, -1)
    for key in keys.unique().tolist():
        if key < 0:
            continue
        members = (keys == key).nonzero().flatten()
        starts, lengths = documents.starts[members, None], documents.lengths[members, None]  # [n, 1]
        offsets = torch.arange(int(lengths.max()))
        valid = offsets < lengths
        tokens = starts + offsets.where(valid, 0)
        yield Bucket(members.to(device), tokens.to(device), valid.to(device))
