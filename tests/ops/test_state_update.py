"""One token of the recurrence against the definition, in every layout of its arguments."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ops import error
from torch import Tensor

from fast_llm_ssm.ops import selective_state_update

B, H, P, G, N = 2, 6, 3, 2, 5


def random_update(dt_by_channel: bool = False, full_decay: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "state": (B, H, P, N),
        "x": (B, H, P),
        "dt": (B, H, P) if dt_by_channel else (B, H),
        "A": (H, P, N) if full_decay else (H,),
        "B": (B, G, N),
        "C": (B, G, N),
        "D": (H, P),
        "z": (B, H, P),
        "dt_bias": (H, P) if dt_by_channel else (H,),
    }
    inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    inputs["A"] = -inputs["A"].abs()
    return inputs


def definition(inputs: dict[str, Tensor], dt_softplus: bool, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """One head, channel and state number at a time."""
    state, y = inputs["state"].clone(), torch.empty(B, H, P, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for p in range(P):
                dt = inputs["dt"][b, h] + inputs["dt_bias"][h] if inputs["dt"].dim() == 2 else (
                    inputs["dt"][b, h, p] + inputs["dt_bias"][h, p]
                )  # fmt: skip
                dt = (F.softplus(dt) if dt_softplus else dt).clamp(*limits)
                decay = inputs["A"][h] if inputs["A"].dim() == 1 else inputs["A"][h, p]
                group = h // (H // G)
                state[b, h, p] = state[b, h, p] * (dt * decay).exp() + dt * inputs["x"][b, h, p] * inputs["B"][b, group]
                y[b, h, p] = state[b, h, p] @ inputs["C"][b, group] + inputs["D"][h, p] * inputs["x"][b, h, p]
    return y * F.silu(inputs["z"]), state


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.2, 0.9)])
@pytest.mark.parametrize("dt_softplus", [True, False])
@pytest.mark.parametrize("dt_by_channel, full_decay", [(False, False), (True, False), (True, True), (False, True)])
def test_equals_the_recurrence(
    dt_by_channel: bool, full_decay: bool, dt_softplus: bool, limits: tuple[float, float]
) -> None:
    inputs = random_update(dt_by_channel, full_decay)
    expected, state = definition(inputs, dt_softplus, limits)
    y = selective_state_update(**inputs, dt_softplus=dt_softplus, dt_limit=limits)  # type: ignore[arg-type]
    assert error(y, expected) < 1e-12
    assert error(inputs["state"], state) < 1e-12  # updated in place


def test_the_head_dimension_may_be_left_out() -> None:
    inputs = random_update(dt_by_channel=True, full_decay=True)
    headed = {name: tensor[:, :1] for name, tensor in inputs.items() if name in ("state", "x", "dt", "B", "C", "z")}
    headed |= {name: inputs[name][:1] for name in ("A", "D", "dt_bias")}
    flat = {
        name: (t[:, 0] if name in ("state", "x", "dt", "B", "C", "z") else t[0]).clone() for name, t in headed.items()
    }
    y = selective_state_update(**headed, dt_softplus=True)
    assert torch.equal(selective_state_update(**flat, dt_softplus=True), y[:, 0])
    assert torch.equal(flat["state"], headed["state"][:, 0])


def test_a_steep_decay_forgets_without_a_nan() -> None:
    inputs = random_update()
    inputs["A"], inputs["dt"] = torch.full((H,), -1e7, dtype=torch.float64), torch.ones(B, H, dtype=torch.float64)
    y = selective_state_update(**inputs)
    assert torch.isfinite(y).all()
    expected, _ = definition({**inputs, "state": torch.zeros_like(inputs["state"])}, False, (0.0, float("inf")))
    assert error(y, expected) < 1e-12


def test_half_precision_inputs_update_an_fp32_state() -> None:
    exact = random_update()
    inputs = {name: tensor.bfloat16() for name, tensor in exact.items()} | {"state": exact["state"].float()}
    expected, state = definition({name: tensor.double() for name, tensor in inputs.items()}, True, (0.0, 1.0))
    y = selective_state_update(**inputs, dt_softplus=True, dt_limit=(0.0, 1.0))
    assert (y.dtype, inputs["state"].dtype) == (torch.bfloat16, torch.float32)
    assert error(y, expected) < 8e-3
    assert error(inputs["state"], state) < 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(B, H)}, r"x is \[2, 6\], expected \[2, 6, 3\]"),
        ({"dt": torch.zeros(B, H + 1)}, "dt is"),
        ({"A": torch.zeros(H, P)}, "A is"),
        ({"B": torch.zeros(B, 4, N)}, "B has 4, expected a divisor of the 6 heads"),
        ({"state": torch.zeros(B, P)}, "state is"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selective_state_update(**{**random_update(), **change})
