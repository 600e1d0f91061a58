"""Causal convolution against PyTorch's, with states and documents, in values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from helpers.ops import assert_near, double, error, gradients, with_outputs
from torch import Tensor

from fast_llm_ssm.ops import causal_conv1d, causal_conv1d_update
from fast_llm_ssm.ops.causal_conv1d import reference

LENGTHS = [[1, 2, 3, 14], [7, 13], [20], [1] * 20, [2, 18], [4, 4, 12]]


def random_conv(
    batch: int = 2, length: int = 20, width: int = 6, taps: int = 4, states: int | None = None
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (batch, width, length),
        "weight": (width, taps),
        "bias": (width,),
        "initial_states": (batch if states is None else states, width, taps - 1),
    }
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def conv(inputs: dict[str, Tensor], **settings: object) -> tuple[Tensor, Tensor]:
    return causal_conv1d(**inputs, **settings, return_final_states=True)  # type: ignore[arg-type, return-value]


def definition(
    x: Tensor, weight: Tensor, initial_states: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """PyTorch's convolution of one document a row behind its initial state."""
    taps = weight.shape[1]
    whole = torch.cat([initial_states, x], dim=2)
    y = F.conv1d(whole, weight[:, None], bias, groups=len(weight)) if x.shape[2] else x
    return (F.silu(y) if activation else y), whole[..., whole.shape[2] - taps + 1 :]


def separate(inputs: dict[str, Tensor], lengths: list[int], **settings: object) -> tuple[Tensor, Tensor]:
    pieces = inputs["x"].split(lengths, dim=2)
    states = inputs["initial_states"]
    found = [
        definition(**{**inputs, "x": x, "initial_states": states[[document]]}, **settings)  # type: ignore[arg-type]
        for document, x in enumerate(pieces)
    ]
    return torch.cat([y for y, _ in found], 2), torch.cat([state for _, state in found])


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 33])
def test_equals_pytorchs_convolution(length: int, taps: int, activation: str | None) -> None:
    inputs = random_conv(length=length, taps=taps)
    got = with_outputs(conv(inputs, activation=activation), inputs)
    assert_near(got, with_outputs(definition(**inputs, activation=activation), inputs), 1e-12)


@pytest.mark.parametrize("length, width", [(70, 6), (33, 5), (16, 300)])
def test_blocks_join_without_a_seam(length: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 100)
    inputs = random_conv(3, length, width)
    got = with_outputs(conv(inputs, activation="silu"), inputs)
    assert_near(got, with_outputs(definition(**inputs, activation="silu"), inputs), 1e-12)


@pytest.mark.parametrize("absent", ["bias", "initial_states"])
def test_optional_arguments_may_be_absent(absent: str) -> None:
    inputs = random_conv()
    del inputs[absent]
    zeros = torch.zeros(2, 6, 3, dtype=torch.float64)
    expected = definition(**{"initial_states": zeros, **inputs})
    assert_near(with_outputs(conv(inputs), inputs), with_outputs(expected, inputs), 1e-12)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "initial_states"])
def test_a_gradient_may_be_wanted_for_one_input_alone(wanted: str) -> None:
    inputs = {name: tensor.requires_grad_(name == wanted) for name, tensor in random_conv().items()}
    one = {wanted: inputs[wanted]}
    assert_near(gradients(conv(inputs), one), gradients(definition(**inputs), one), 1e-12)


def test_gradients_pass_gradcheck() -> None:
    inputs = random_conv(1, 4, 2, 3)
    documents = torch.tensor([[0, 0, 1, 1]])

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return conv(dict(zip(inputs, tensors, strict=True)), activation="silu", seq_idx=documents)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


@pytest.mark.parametrize("split", [1, 2, 3, 4, 10, 18, 19])
def test_a_sequence_split_anywhere_equals_one_call(split: int) -> None:
    """Also where a piece is shorter than the filter, and some of its final state is older."""
    inputs = random_conv()
    pieces, state = [], inputs["initial_states"]
    for x in inputs["x"].split([split, 20 - split], dim=2):
        y, state = conv({**inputs, "x": x, "initial_states": state}, activation="silu")
        pieces.append(y)
    got = with_outputs((torch.cat(pieces, 2), state), inputs)
    assert_near(got, with_outputs(conv(inputs, activation="silu"), inputs), 1e-12)


def test_single_tokens_equal_the_whole() -> None:
    inputs = {name: tensor.detach() for name, tensor in random_conv().items()}
    y, final = conv(inputs, activation="silu")
    state = inputs["initial_states"].clone()
    steps = [
        causal_conv1d_update(inputs["x"][..., t], state, inputs["weight"], inputs["bias"], "silu") for t in range(20)
    ]
    assert error(torch.stack(steps, 2), y) < 1e-12
    assert torch.equal(state, final)


@pytest.mark.parametrize("lengths", [*LENGTHS, [0, 20], [6, 0, 0, 14], [20, 0]], ids=str)
def test_cu_seqlens_equals_separate_documents_each_with_its_states(lengths: list[int]) -> None:
    inputs = random_conv(1, states=len(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    got = with_outputs(conv(inputs, cu_seqlens=bounds, activation="silu"), inputs)
    assert_near(got, with_outputs(separate(inputs, lengths, activation="silu"), inputs), 1e-12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_seq_idx_equals_separate_documents_and_the_state_comes_before_the_first(lengths: list[int]) -> None:
    inputs = random_conv(1)
    seq_idx = torch.arange(5, 5 + len(lengths)).repeat_interleave(torch.tensor(lengths))[None].int()
    zeros = torch.zeros(len(lengths) - 1, 6, 3, dtype=torch.float64)
    seeded = {**inputs, "initial_states": torch.cat([inputs["initial_states"], zeros])}
    y, states = separate(seeded, lengths)
    assert_near(with_outputs(conv(inputs, seq_idx=seq_idx), inputs), with_outputs((y, states[-1:]), inputs), 1e-12)


@pytest.mark.parametrize("boundary", [1, 2, 3, 10, 19])
def test_a_document_cannot_see_another(boundary: int) -> None:
    inputs = random_conv()
    seq_idx = (torch.arange(20) >= boundary).int().expand(2, -1)
    y, _ = conv(inputs, seq_idx=seq_idx)
    changed = {**inputs, "x": inputs["x"].detach().clone()}
    changed["x"][..., boundary - 1] = float("nan")
    assert torch.equal(conv(changed, seq_idx=seq_idx)[0][..., boundary:], y[..., boundary:])
    (grad,) = torch.autograd.grad(y[..., boundary:].square().sum(), inputs["x"])
    assert not grad[..., :boundary].any()


def test_views_of_a_wide_projection_and_an_expanded_gradient() -> None:
    wide = torch.randn(2, 20, 11, dtype=torch.float64, requires_grad=True)
    inputs = random_conv()
    y = causal_conv1d(wide[..., 3:9].transpose(1, 2), inputs["weight"])
    y.sum().backward()  # type: ignore[union-attr]
    copy = wide.detach()[..., 3:9].transpose(1, 2).contiguous().requires_grad_()
    expected, _ = definition(copy, inputs["weight"], torch.zeros_like(inputs["initial_states"]))
    expected.backward(torch.ones_like(expected))
    assert error(y, expected) < 1e-12  # type: ignore[arg-type]
    assert error(wide.grad[..., 3:9].transpose(1, 2), copy.grad) < 1e-12  # type: ignore[index, arg-type]
    assert y.transpose(1, 2).is_contiguous()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.float32, 1e-6)])
def test_low_precision_is_near_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in random_conv(length=50).items()}
    exact = double(inputs)
    got = with_outputs(conv(inputs, activation="silu"), inputs)
    assert all(tensor.dtype == dtype for tensor in got.values())
    assert_near(got, with_outputs(definition(**exact, activation="silu"), exact), tolerance)


def test_shapes_on_the_meta_device() -> None:
    inputs = {name: tensor.detach().to("meta") for name, tensor in random_conv().items()}
    y, state = conv(inputs)
    assert (y.shape, state.shape) == ((2, 6, 20), (2, 6, 3))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(5, 4)}, r"weight is \[5, 4\], expected \[6, 4\]"),
        ({"weight": torch.zeros(6, 1)}, "weight has 1 taps"),
        ({"bias": torch.zeros(4)}, "bias is"),
        ({"initial_states": torch.zeros(2, 6, 4)}, "initial_states is"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"seq_idx": torch.zeros(2, 20), "cu_seqlens": torch.tensor([0, 20])}, "expected one of them"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "for a batch of 2"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{**random_conv(), **change})  # type: ignore[arg-type]


def test_a_wrong_state_is_refused_in_the_update() -> None:
    with pytest.raises(ValueError, match=r"conv_state is \[2, 6, 4\], expected \[2, 6, 3\]"):
        causal_conv1d_update(torch.zeros(2, 6), torch.zeros(2, 6, 4), torch.zeros(6, 4))
