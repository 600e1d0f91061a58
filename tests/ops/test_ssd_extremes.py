"""SSD where numbers or memory usually run away: steep decays, clamped steps, long sequences."""

import math

import pytest
import torch
from helpers.ops import MemoryMeter, assert_near, double, error, random_ssd, with_outputs
from torch import Tensor

from fast_llm_ssm.ops import selective_state_update, ssd
from fast_llm_ssm.ops.ssd.definition import ssd_definition


def scan(inputs: dict[str, Tensor], **settings: object) -> tuple[Tensor, Tensor]:
    return ssd(**inputs, **settings, chunk_size=32, return_final_states=True)  # type: ignore[arg-type, return-value]


def steep(decay: float, steps: Tensor) -> dict[str, Tensor]:
    """fp32 arguments with A = decay and the given steps [T]."""
    inputs = random_ssd(1, len(steps), dtype=torch.float32)
    del inputs["dt_bias"]
    inputs["A"] = torch.full((4,), decay, requires_grad=True)
    inputs["dt"] = steps[None, :, None].expand(1, -1, 4).clone().requires_grad_()
    return inputs


@pytest.mark.parametrize("decay", [-1e4, -1e5, -1e6, -1e7])
def test_steep_decays_are_finite_and_right(decay: float) -> None:
    inputs = steep(decay, torch.ones(100))
    exact = double(inputs)
    got = with_outputs(scan(inputs), inputs)
    expected = with_outputs(ssd_definition(**exact), exact)
    assert_near(got, expected, 1e-6)
    assert not got["A"].any()  # nothing is left to decay


@pytest.mark.parametrize("decay", [-1e4, -1e6])
def test_random_steps_up_to_ten_under_steep_decays_are_right(decay: float) -> None:
    """Among long steps, a few are so short that their decay counts."""
    steps = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 10
    steps[::7] = 0.3 / abs(decay)
    inputs = steep(decay, steps)
    exact = double(inputs)
    assert_near(with_outputs(scan(inputs), inputs), with_outputs(ssd_definition(**exact), exact), 2e-5)


def test_a_weak_decay_behind_a_strong_one_still_counts() -> None:
    """From a running sum of -100.0 to -100.1 the state decays by 0.9048; from -1e6 on as well."""
    for strong in (100.0, 1e6):
        inputs = steep(-1.0, torch.tensor([strong, 0.1, 0.1]))
        ones = {name: torch.ones_like(tensor) for name, tensor in inputs.items() if name in ("x", "B", "C")}
        ones["x"][:, 1:] = 0
        y, _ = scan({**ones, "A": inputs["A"], "dt": inputs["dt"]})
        assert torch.allclose(y[0, 2] / y[0, 1], torch.tensor(math.exp(-0.1)), rtol=1e-6)
        assert torch.allclose(y[0, 1], torch.tensor(5 * strong * math.exp(-0.1)), rtol=1e-6)


def test_fast_heads_have_accurate_step_gradients() -> None:
    inputs = steep(-16.0, torch.full((100,), 0.5))
    exact = double(inputs)
    assert_near(with_outputs(scan(inputs), inputs), with_outputs(ssd_definition(**exact), exact), 1e-5)


def test_steps_of_zero_and_inputs_of_zero_have_finite_gradients() -> None:
    inputs = random_ssd(dtype=torch.float32)
    with torch.no_grad():
        inputs["dt"][:, 3:9] = -1e4  # softplus gives 0
        inputs["dt"][:, 12] = 1e4
        inputs["x"][:, 5:14] = 0
    exact = double(inputs)
    got = with_outputs(scan(inputs, dt_softplus=True), inputs)
    assert_near(got, with_outputs(ssd_definition(**exact, dt_softplus=True), exact), 1e-5)


@pytest.mark.parametrize("limits", [(0.01, 0.1), (0.0, 0.05), (0.1, math.inf), (0.2, 0.2)])
def test_steps_are_clamped_after_softplus_and_have_no_gradient_outside(limits: tuple[float, float]) -> None:
    inputs = random_ssd()
    with torch.no_grad():
        inputs["dt"] *= 3
    settings = {"dt_softplus": True, "dt_limit": limits}
    got = with_outputs(scan(inputs, **settings), inputs)
    assert_near(got, with_outputs(ssd_definition(**inputs, **settings), inputs), 1e-11)  # type: ignore[arg-type]
    step = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    outside = (step < limits[0]) | (step > limits[1])
    assert outside.any()
    assert not got["dt"][outside].any()


def test_a_half_precision_model_keeps_its_state_in_fp32() -> None:
    """2,000 bf16 tokens one at a time stay as near the exact scan at the end as at the beginning."""
    inputs = {name: tensor.detach() for name, tensor in random_ssd(1, 2000, 2, 4, 1, 8, dtype=torch.bfloat16).items()}
    fixed = {name: inputs[name].float() for name in ("A", "D", "dt_bias")}
    fixed["A"] *= 0.02
    state = torch.zeros(1, 2, 4, 8)
    steps = [
        selective_state_update(
            state, inputs["x"][:, t], inputs["dt"][:, t], fixed["A"], inputs["B"][:, t], inputs["C"][:, t], fixed["D"],
            inputs["z"][:, t], fixed["dt_bias"], dt_softplus=True,
        )
        for t in range(2000)
    ]  # fmt: skip
    exact = {name: tensor.double() for name, tensor in {**inputs, **fixed}.items() if name != "initial_states"}
    y, final = ssd_definition(**exact, dt_softplus=True)
    assert error(torch.stack(steps, 1)[:, :200], y[:, :200]) < 4e-3
    assert error(torch.stack(steps, 1)[:, -200:], y[:, -200:]) < 4e-3
    assert error(state, final) < 1e-5


def peak(length: int, documents: bool) -> MemoryMeter:
    inputs = random_ssd(1, length, 2, 8, 1, 8, dtype=torch.float32)
    seq_idx = (torch.arange(length) // 700)[None] if documents else None
    with MemoryMeter() as meter:
        y, state = ssd(**inputs, chunk_size=256, dt_softplus=True, seq_idx=seq_idx, return_final_states=True)  # type: ignore[misc, arg-type]
        (y.sum() + state.sum()).backward()
    return meter


@pytest.mark.parametrize("documents", [False, True])
def test_memory_is_linear_in_the_length(documents: bool) -> None:
    short, long = peak(4096, documents), peak(8192, documents)
    assert long.peak <= 2.2 * short.peak
    assert long.largest < 8192 * 2 * 8 * 8  # nothing of the size length x inner x state, let alone length x length
    assert long.peak < 20 * 8192 * 2 * 8 * 4  # bytes of twenty tensors like x
