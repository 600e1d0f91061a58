"""Cross-entropy of a linear layer's logits, without ever holding all of them."""

from typing import Literal

from torch import Tensor

from fast_llm_ssm.ops.checks import can_read
from fast_llm_ssm.ops.cross_entropy import reference


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
    """Cross-entropy of `logits_scale * hidden @ weight.T` against `targets`, a chunk of tokens at a time, forward and
    backward.

        loss = sum_t ( log sum_v exp(logits_tv) - logits_t,target_t )

    Args:
        hidden: [..., d], floating.
        weight: [V, d].
        targets: [...] integers below V, or `ignore_index`.
        ignore_index: target of tokens that do not count.
        logits_scale: factor on the logits.
        reduction: "sum", or "mean" over the tokens that count (0 when there are none).
        chunk_size: tokens whose logits exist at once; None chooses by the vocabulary.

    Returns:
        Scalar in fp32 (fp64 for fp64 inputs); logits, log-sum-exp and the sums over chunks are in that dtype.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, or (checked on the CPU) a target outside the
            vocabulary.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"linear_cross_entropy: reduction is {reduction!r}, expected 'mean' or 'sum'")
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            "linear_cross_entropy: hidden, weight and targets must be [..., d], [V, d] and [...]; "
            f"got {list(hidden.shape)}, {list(weight.shape)} and {list(targets.shape)}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"linear_cross_entropy: chunk_size is {chunk_size}, expected at least 1")
    if can_read(targets):
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= weight.shape[0]))
        if outside.any():
            wrong = targets[outside][0].item()
            raise ValueError(f"linear_cross_entropy: target {wrong} is outside the vocabulary of {weight.shape[0]}")
    return reference.linear_cross_entropy(
        hidden,
        weight,
        targets,
        ignore_index=ignore_index,
        logits_scale=logits_scale,
        reduction=reduction,
        chunk_size=chunk_size,
    )
