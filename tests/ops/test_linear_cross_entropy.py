"""Chunked cross-entropy against PyTorch's on the full logits."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ops import MemoryMeter, assert_near, double, error, with_outputs
from torch import Tensor

from fast_llm_ssm.ops import linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 23, 6, 11


def random_loss(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[::5] = -100
    return {name: t.to(dtype).requires_grad_() for name, t in (("hidden", hidden), ("weight", weight))}, targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("logits_scale", [1.0, 0.3])
@pytest.mark.parametrize("chunk_size", [1, 7, 23, 100, None])
def test_equals_the_full_cross_entropy(chunk_size: int | None, logits_scale: float, reduction: str) -> None:
    inputs, targets = random_loss()
    loss = linear_cross_entropy(
        **inputs, targets=targets, chunk_size=chunk_size, logits_scale=logits_scale, reduction=reduction  # type: ignore[arg-type]
    )  # fmt: skip
    logits = logits_scale * inputs["hidden"] @ inputs["weight"].T
    expected = F.cross_entropy(logits, targets, reduction=reduction)
    assert_near(with_outputs(loss, inputs), with_outputs(expected, inputs), 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_targets_give_zero_and_no_gradient(reduction: str) -> None:
    inputs, targets = random_loss()
    loss = linear_cross_entropy(**inputs, targets=torch.full_like(targets, -100), reduction=reduction)  # type: ignore[arg-type]
    loss.backward()
    assert loss == 0
    for tensor in inputs.values():
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_another_ignored_index_and_leading_dimensions() -> None:
    inputs, targets = random_loss()
    shaped = linear_cross_entropy(inputs["hidden"].view(1, TOKENS, WIDTH), inputs["weight"], targets[None])
    ignoring = targets.where(targets != -100, 3)
    other = linear_cross_entropy(**inputs, targets=ignoring, ignore_index=3)
    keep = ignoring != 3
    expected = F.cross_entropy(inputs["hidden"][keep] @ inputs["weight"].T, ignoring[keep])
    assert error(shaped, F.cross_entropy(inputs["hidden"] @ inputs["weight"].T, targets)) < 1e-12
    assert error(other, expected) < 1e-12


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_a_gradient_may_be_wanted_for_one_input_alone(wanted: str) -> None:
    inputs, targets = random_loss()
    inputs = {name: tensor.requires_grad_(name == wanted) for name, tensor in inputs.items()}
    one = {wanted: inputs[wanted]}
    expected = F.cross_entropy(inputs["hidden"] @ inputs["weight"].T, targets)
    got = with_outputs(linear_cross_entropy(**inputs, targets=targets), one)
    assert_near(got, with_outputs(expected, one), 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
def test_low_precision_is_near_and_the_loss_is_fp32(dtype: torch.dtype, tolerance: float) -> None:
    inputs, targets = random_loss(dtype)
    exact = double(inputs)
    loss = linear_cross_entropy(**inputs, targets=targets, chunk_size=7)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(exact["hidden"] @ exact["weight"].T, targets)
    assert_near(with_outputs(loss, inputs), with_outputs(expected, exact), tolerance)


def test_huge_logits_stay_finite() -> None:
    inputs, targets = random_loss(torch.float32)
    with torch.no_grad():
        inputs["hidden"] *= 1e4
    exact = double(inputs)
    expected = F.cross_entropy(exact["hidden"] @ exact["weight"].T, targets)
    got = with_outputs(linear_cross_entropy(**inputs, targets=targets), inputs)
    assert_near(got, with_outputs(expected, exact), 1e-5)


def test_the_full_logits_never_exist() -> None:
    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    targets = torch.randint(1000, (512,))
    with MemoryMeter() as meter:
        linear_cross_entropy(hidden, weight, targets, chunk_size=64).backward()
    assert meter.largest <= 64 * 1000


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reduction": "none"}, "reduction is 'none'"),
        ({"targets": torch.zeros(5, dtype=torch.long)}, "must be"),
        ({"weight": torch.zeros(11, 5)}, "must be"),
        ({"targets": torch.full((TOKENS,), 11)}, "target 11 is outside the vocabulary of 11"),
        ({"targets": torch.full((TOKENS,), -1)}, "target -1 is outside"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], message: str) -> None:
    inputs, targets = random_loss()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**inputs, "targets": targets, **change})  # type: ignore[arg-type]
