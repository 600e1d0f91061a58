"""SSD against its definition: values, states and every gradient."""

import functools
import math

import pytest
import torch
from helpers.ops import SSD_TENSORS, assert_near, double, error, gradients, random_ssd, with_outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fast_llm_ssm.ops import selective_state_update, ssd
from fast_llm_ssm.ops.ssd.definition import ssd_definition

ODD_LENGTHS = [1, 2, 3, 63, 64, 65, 200, 255, 256, 257, 511]


def both(inputs: dict[str, Tensor], **settings: object) -> tuple[Tensor, Tensor]:
    return ssd(**inputs, chunk_size=8, return_final_states=True, **settings)  # type: ignore[arg-type, return-value]


@functools.cache
def truth(length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs = random_ssd(1, length, seed=length)
    return inputs, with_outputs(ssd_definition(**inputs, dt_softplus=True), inputs)


@pytest.mark.parametrize("chunk_size", [16, 64, 128, 256])
@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_every_length_and_chunk_size_gives_the_definition_and_its_gradients(length: int, chunk_size: int) -> None:
    inputs, expected = truth(length)
    outputs = ssd(**inputs, chunk_size=chunk_size, dt_softplus=True, return_final_states=True)
    assert_near(with_outputs(outputs, inputs), expected, 1e-11)
    single = {name: tensor.detach().float().requires_grad_() for name, tensor in inputs.items()}
    outputs = ssd(**single, chunk_size=chunk_size, dt_softplus=True, return_final_states=True)
    assert_near(with_outputs(outputs, single), expected, 2e-5)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(0, 40),
    chunk_size=st.integers(1, 17),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    dim=st.integers(1, 5),
    size=st.integers(1, 5),
    batch=st.integers(1, 2),
)
def test_any_shape(
    length: int, chunk_size: int, groups: int, heads_per_group: int, dim: int, size: int, batch: int
) -> None:
    inputs = random_ssd(batch, length, groups * heads_per_group, dim, groups, size)
    outputs = ssd(**inputs, chunk_size=chunk_size, dt_softplus=True, return_final_states=True)
    expected = with_outputs(ssd_definition(**inputs, dt_softplus=True), inputs)
    assert_near(with_outputs(outputs, inputs), expected, 1e-11)


def test_gradients_pass_gradcheck() -> None:
    inputs = random_ssd(1, 5, 2, 2, 1, 2)

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(inputs, tensors, strict=True))
        return ssd(**named, chunk_size=2, dt_softplus=True, return_final_states=True)  # type: ignore[arg-type, return-value]

    assert torch.autograd.gradcheck(scan, tuple(inputs.values()))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_head_j_reads_group_j_over_heads_per_group(groups: int) -> None:
    inputs = random_ssd(1, 12, 8, 2, groups, 3)
    expanded = {**inputs, **{name: inputs[name].repeat_interleave(8 // groups, dim=2) for name in "BC"}}
    y, state = both(inputs)
    for head in range(8):
        one = {name: tensor[:, :, head : head + 1] for name, tensor in expanded.items() if tensor.dim() == 4}
        alone = ssd(
            one["x"], inputs["dt"][:, :, [head]], inputs["A"][[head]], one["B"], one["C"], 8, inputs["D"][[head]],
            one["z"], inputs["dt_bias"][[head]], inputs["initial_states"][:, [head]],
        )  # fmt: skip
        assert error(y[:, :, [head]], alone) < 1e-12  # type: ignore[arg-type]


@pytest.mark.parametrize("absent", [*SSD_TENSORS[5:], "all"])
def test_each_optional_argument_may_be_absent(absent: str) -> None:
    gone = SSD_TENSORS[5:] if absent == "all" else (absent,)
    inputs = {name: tensor for name, tensor in random_ssd().items() if name not in gone}
    expected = with_outputs(ssd_definition(**inputs, dt_softplus=True), inputs)
    assert_near(with_outputs(both(inputs, dt_softplus=True), inputs), expected, 1e-11)


def test_skip_may_be_one_number_a_head() -> None:
    inputs = random_ssd()
    inputs["D"] = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert_near(with_outputs(both(inputs), inputs), with_outputs(ssd_definition(**inputs), inputs), 1e-11)


@pytest.mark.parametrize("wanted", SSD_TENSORS)
def test_a_gradient_may_be_wanted_for_one_input_alone(wanted: str) -> None:
    inputs = {name: tensor.requires_grad_(name == wanted) for name, tensor in random_ssd().items()}
    got = gradients(both(inputs), {wanted: inputs[wanted]})
    assert_near(got, gradients(ssd_definition(**inputs), {wanted: inputs[wanted]}), 1e-11)


def test_a_gradient_may_come_through_the_final_states_alone() -> None:
    inputs = random_ssd()
    got, expected = (gradients(outputs[1], inputs) for outputs in (both(inputs), ssd_definition(**inputs)))
    assert_near(got, expected, 1e-11)
    assert got["initial_states"].abs().max() > 0


@pytest.mark.parametrize("split", [1, 2, 7, 8, 9, 15, 16, 19])
def test_a_sequence_split_anywhere_equals_one_call(split: int) -> None:
    inputs = random_ssd()

    def piece(span: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        timed = {
            name: tensor[:, span] if name in ("x", "dt", "B", "C", "z") else tensor for name, tensor in inputs.items()
        }
        return both({**timed, "initial_states": state}, dt_softplus=True)

    first, state = piece(slice(0, split), inputs["initial_states"])
    second, state = piece(slice(split, None), state)
    got = with_outputs((torch.cat([first, second], 1), state), inputs)
    assert_near(got, with_outputs(both(inputs, dt_softplus=True), inputs), 1e-11)


def test_single_steps_equal_the_scan() -> None:
    limits = (0.05, 0.4)
    inputs = {name: tensor.detach() for name, tensor in random_ssd().items()}
    y, final = both(inputs, dt_softplus=True, dt_limit=limits)
    state = inputs["initial_states"].clone()
    steps = [
        selective_state_update(
            state, inputs["x"][:, t], inputs["dt"][:, t], inputs["A"], inputs["B"][:, t], inputs["C"][:, t],
            inputs["D"], inputs["z"][:, t], inputs["dt_bias"], dt_softplus=True, dt_limit=limits,
        )
        for t in range(20)
    ]  # fmt: skip
    assert error(torch.stack(steps, 1), y) < 1e-12
    assert error(state, final) < 1e-12


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_low_precision_is_near_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    inputs = random_ssd(length=70, dtype=dtype)
    for name in ("A", "D", "dt_bias"):  # parameters that stay in fp32
        inputs[name] = inputs[name].detach().float().requires_grad_()
    exact = double(inputs)
    y, state = both(inputs, dt_softplus=True)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    got = with_outputs((y, state), inputs)
    assert all(got[name].dtype == tensor.dtype for name, tensor in inputs.items())
    assert_near(got, with_outputs(ssd_definition(**exact, dt_softplus=True), exact), tolerance)


def test_softplus_of_half_precision_steps_is_taken_in_fp32() -> None:
    """softplus(-9) is 1.2e-4; in bf16 the sum with its bias would already have lost it."""
    inputs = random_ssd(1, 1, 1, 1, 1, 1)
    inputs = {name: torch.ones_like(inputs[name]) for name in "xBC"} | {"A": -torch.ones(1)}
    dt, bias = torch.full((1, 1, 1), 0.015625), torch.tensor([-9.0])
    y = ssd(
        **{k: v.bfloat16() for k, v in inputs.items()}, dt=dt.bfloat16(), dt_bias=bias, dt_softplus=True, chunk_size=4
    )
    expected = math.log1p(math.exp(0.015625 - 9))
    assert abs(float(y) / expected - 1) < 2**-8  # type: ignore[arg-type]


def test_views_of_a_wide_projection_and_an_expanded_gradient() -> None:
    wide = torch.randn(2, 20, 4 * 3 * 2 + 2 * 2 * 5 + 4, dtype=torch.float64, requires_grad=True)
    z, x, B, C, dt = wide.split([12, 12, 10, 10, 4], dim=2)
    A = -torch.rand(4, dtype=torch.float64)
    views = {
        "x": x.unflatten(2, (4, 3)), "dt": dt, "A": A, "B": B.unflatten(2, (2, 5)), "C": C.unflatten(2, (2, 5)),
        "z": z.unflatten(2, (4, 3)),
    }  # fmt: skip
    copies = {name: tensor.detach().contiguous().requires_grad_() for name, tensor in views.items()}
    y = ssd(**views, chunk_size=8, dt_softplus=True)
    y.sum().backward()  # type: ignore[union-attr]
    expected, _ = ssd_definition(**copies, dt_softplus=True)
    expected.backward(torch.ones_like(expected))
    assert error(y, expected) < 1e-12  # type: ignore[arg-type]
    flat = [copies[name].grad.flatten(2) for name in ("z", "x", "B", "C", "dt")]  # type: ignore[union-attr]
    assert error(wide.grad, torch.cat(flat, 2)) < 1e-11  # type: ignore[arg-type]


def test_activation_checkpointing_changes_nothing() -> None:
    inputs = random_ssd()
    saved = checkpoint(lambda: both(inputs, dt_softplus=True), use_reentrant=False)
    got = with_outputs(saved, inputs)
    plain = with_outputs(both(inputs, dt_softplus=True), inputs)
    assert all(torch.equal(got[name], plain[name]) for name in got)


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = random_ssd(length=50, dtype=torch.float32)
    first, second = (with_outputs(both(inputs), inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_shapes_on_the_meta_device() -> None:
    inputs = {name: tensor.detach().to("meta") for name, tensor in random_ssd().items()}
    y, state = both(inputs)
    assert (y.shape, state.shape) == ((2, 20, 4, 3), (2, 4, 3, 5))


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    inputs = random_ssd(1, 4)
    compiled = torch.compile(lambda **named: both(named, dt_softplus=True), fullgraph=True, backend="aot_eager")
    got = with_outputs(compiled(**inputs), inputs)
    assert_near(got, with_outputs(both(inputs, dt_softplus=True), inputs), 1e-12)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"A": torch.tensor([-1.0, -1, 0.5, -1])}, "A is positive"),
        ({"dt": torch.zeros(2, 20, 3)}, r"dt is \[2, 20, 3\], expected \[2, 20, 4\]"),
        ({"B": torch.zeros(2, 20, 3, 5)}, "B has 3, expected a divisor of the 4 heads"),
        ({"C": torch.zeros(2, 20, 2, 4)}, "C is"),
        ({"D": torch.zeros(3)}, "D is"),
        ({"initial_states": torch.zeros(1, 4, 3, 5)}, "initial_states is"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"dt_limit": (1.0, 0.1)}, "dt_limit"),
        ({"x": torch.zeros(2, 20, 12)}, "x is"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"backend": "triton"}, "the triton backend cannot run"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ssd(**{**random_ssd(), "chunk_size": 8, **change})  # type: ignore[arg-type]
