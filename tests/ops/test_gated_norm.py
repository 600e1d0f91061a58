"""Gated RMSNorm: per group, before or after its gate."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ops import assert_near, double, error, with_outputs
from torch import Tensor

from fast_llm_ssm.ops import gated_rms_norm


def random_norm(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": shape, "weight": shape[-1:], "bias": shape[-1:], "z": shape}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}


def definition(inputs: dict[str, Tensor], eps: float, group_size: int, norm_before_gate: bool) -> Tensor:
    gate = F.silu(inputs["z"]) if "z" in inputs else torch.ones_like(inputs["x"])
    value = inputs["x"] if norm_before_gate else inputs["x"] * gate
    pieces = [piece / (piece.pow(2).mean(-1, keepdim=True) + eps).sqrt() for piece in value.split(group_size, -1)]
    value = torch.cat(pieces, -1) * inputs["weight"] + inputs.get("bias", 0)
    return value * gate if norm_before_gate else value


@pytest.mark.parametrize("absent", ["none", "z", "bias"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [1, 3, 12])
def test_equals_the_formula_and_its_gradients(group_size: int, norm_before_gate: bool, absent: str) -> None:
    inputs = {name: tensor for name, tensor in random_norm(2, 5, 12).items() if name != absent}
    y = gated_rms_norm(**inputs, eps=1e-3, group_size=group_size, norm_before_gate=norm_before_gate)  # type: ignore[arg-type]
    expected = definition(inputs, 1e-3, group_size, norm_before_gate)
    assert_near(with_outputs(y, inputs), with_outputs(expected, inputs), 1e-12)


def test_each_of_four_groups_of_different_scale_has_rms_one() -> None:
    x = random_norm(3, 7, 64)["x"].unflatten(2, (4, 16)) * torch.tensor([1e-2, 1.0, 30.0, 1e3])[:, None]
    y = gated_rms_norm(x.flatten(2), torch.ones(64), eps=1e-12, group_size=16).unflatten(2, (4, 16))
    assert error(y.square().mean(-1).sqrt(), torch.ones(3, 7, 4)) < 1e-6
    whole = gated_rms_norm(x.flatten(2), torch.ones(64), eps=1e-12)
    assert error(whole.square().mean(-1).sqrt(), torch.ones(3, 7)) < 1e-6


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 4, 12), (0, 12)])
def test_any_number_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    inputs = random_norm(*shape)
    y = gated_rms_norm(**inputs, group_size=4)  # type: ignore[arg-type]
    assert error(y, definition(inputs, 1e-6, 4, True)) < 1e-12


def test_a_gate_that_is_a_view_and_an_expanded_gradient() -> None:
    wide = torch.randn(2, 5, 30, dtype=torch.float64, requires_grad=True)
    inputs = random_norm(2, 5, 12)
    gated_rms_norm(inputs["x"], inputs["weight"], z=wide[..., 7:19]).sum().backward()
    copy = {"x": inputs["x"], "weight": inputs["weight"], "z": wide.detach()[..., 7:19].contiguous().requires_grad_()}
    definition(copy, 1e-6, 12, True).sum().backward()
    assert error(wide.grad[..., 7:19], copy["z"].grad) < 1e-12  # type: ignore[index, arg-type]


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-6)])
def test_low_precision_is_near_the_formula(dtype: torch.dtype, tolerance: float, norm_before_gate: bool) -> None:
    inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in random_norm(2, 5, 64).items()}
    exact = double(inputs)
    y = gated_rms_norm(**inputs, group_size=16, norm_before_gate=norm_before_gate)  # type: ignore[arg-type]
    assert y.dtype == dtype
    expected = definition(exact, 1e-6, 16, norm_before_gate)
    assert_near(with_outputs(y, inputs), with_outputs(expected, exact), tolerance)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(11)}, r"weight is \[11\], expected \[12\]"),
        ({"bias": torch.zeros(1)}, "bias is"),
        ({"z": torch.zeros(2, 12)}, "z is"),
        ({"group_size": 5}, "group_size is 5, expected a divisor of 12"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**random_norm(2, 5, 12), **change})  # type: ignore[arg-type]
