"""Rows of tokens as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .rows import IGNORE_INDEX, Row


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, with the ends of their documents.

    Attributes:
        tokens: [B, T] int64.
        targets: [B, T] int64: the next token, -100 where it is of another document or padding.
        cu_seqlens: [documents + 1] int32 ascending positions in the flattened B*T tokens: 0, the end of each document
            (or part of one) and of each row.
        num_targets: How many targets are not -100.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    num_targets: int

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; from pinned memory the copy does not wait."""
        tokens, targets, cu_seqlens = (
            tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.targets, self.cu_seqlens)
        )
        return Batch(tokens, targets, cu_seqlens, self.num_targets)

    def pin_memory(self) -> Batch:
        """The batch in pinned memory, from which copies to a GPU are fast."""
        return Batch(
            self.tokens.pin_memory(), self.targets.pin_memory(), self.cu_seqlens.pin_memory(), self.num_targets
        )


def make_batch(rows: Sequence[Row]) -> Batch:
    """Stacks rows into a batch."""
    length = len(rows[0].tokens)
    targets = np.stack([row.targets for row in rows])
    boundaries = [0] + [number * length + end for number, row in enumerate(rows) for end in row.ends]
    return Batch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        targets=torch.from_numpy(targets),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        num_targets=int((targets != IGNORE_INDEX).sum()),
    )
