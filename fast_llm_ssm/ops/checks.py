"""Argument checks that the ops share. All raise ValueError with the op, the argument, what was got and what is
expected.
"""

import torch
from torch import Tensor

Shape = tuple[int, ...]


def check_rank(op: str, name: str, tensor: Tensor, letters: str) -> None:
    """Check the number of dimensions, named by `letters`, as in "B T H P"."""
    if tensor.dim() != len(letters.split()):
        raise ValueError(f"{op}: {name} is {list(tensor.shape)}, expected [{', '.join(letters.split())}]")


def check_shape(op: str, name: str, tensor: Tensor | None, *allowed: Shape) -> None:
    """Check that a tensor, where given, has one of the allowed shapes."""
    if tensor is not None and tuple(tensor.shape) not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{op}: {name} is {list(tensor.shape)}, expected {expected}")


def check_groups(op: str, name: str, groups: int, heads: int) -> None:
    """Check that the groups divide the heads."""
    if groups == 0 or heads % groups:
        raise ValueError(f"{op}: {name} has {groups}, expected a divisor of the {heads} heads")


def check_documents(op: str, batch: int, length: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Check the two ways to separate documents. Returns how many initial states there are: one a row, or one a
    document of `cu_seqlens`.
    """
    if cu_seqlens is None:
        check_shape(op, "seq_idx", seq_idx, (batch, length))
        return batch
    if seq_idx is not None:
        raise ValueError(f"{op}: seq_idx and cu_seqlens both separate documents, expected one of them")
    check_rank(op, "cu_seqlens", cu_seqlens, "documents+1")
    if batch != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"{op}: cu_seqlens has {len(cu_seqlens)} entries for a batch of {batch}, expected 2 or more and 1"
        )
    return len(cu_seqlens) - 1


def can_read(tensor: Tensor) -> bool:
    """Whether a tensor's values can be checked: on the CPU, where that waits for nothing, and not while compiling."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
