"""Chunked linear cross-entropy in plain PyTorch."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 25  # logits that exist at once: 128 MiB in fp32


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the sums and the result in `dtype`."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the loss of hidden [tokens, d], weight [V, d], targets [tokens]; the backward computes the
    logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, scale: float, chunk_size: int
    ) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        counts = targets != ignore_index
        targets = targets * counts
        total = hidden.new_zeros((), dtype=dtype)
        sums = hidden.new_empty(len(hidden), dtype=dtype)
        for span in _spans(len(hidden), chunk_size):
            logits = _logits(hidden[span], weight, scale, dtype)
            sums[span] = logits.logsumexp(1)
            picked = logits.gather(1, targets[span, None]).squeeze(1)
            total += ((sums[span] - picked) * counts[span]).sum()
        ctx.save_for_backward(hidden, weight, targets, counts, sums)
        ctx.scale, ctx.chunk_size = scale, chunk_size
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, counts, sums = ctx.saved_tensors
        dtype = sums.dtype
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for span in _spans(len(hidden), ctx.chunk_size):
            logits = _logits(hidden[span], weight, ctx.scale, dtype)
            dlogits = logits.sub_(sums[span, None]).exp_()
            dlogits.scatter_add_(1, targets[span, None], dlogits.new_full((1, 1), -1).expand(len(dlogits), 1))
            dlogits.mul_((counts[span] * (dtotal * ctx.scale))[:, None])
            dlogits = dlogits.to(weight.dtype) if weight.is_cuda else dlogits
            if dhidden is not None:
                dhidden[span] = _matmul(dlogits, weight, dtype)
            if dweight is not None:
                dweight += _matmul(dlogits.mT, hidden[span], dtype)
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None, None


def _spans(length: int, chunk_size: int) -> Iterator[slice]:
    for start in range(0, length, chunk_size):
        yield slice(start, start + chunk_size)


def _logits(hidden: Tensor, weight: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    logits = _matmul(hidden, weight.mT, dtype)
    return logits if scale == 1.0 else logits.mul_(scale)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """The implementation of `fast_llm_ssm.ops.linear_cross_entropy`, which see."""
    chunk_size = chunk_size or max(128, _CHUNK_ELEMENTS // weight.shape[0])
    targets = targets.flatten()
    total = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, targets, ignore_index, logits_scale, chunk_size
    )
    if reduction == "sum":
        return total
    return total / (targets != ignore_index).sum().clamp(min=1)
