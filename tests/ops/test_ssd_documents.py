"""Documents that share a row: as if each were alone, in values and gradients."""

import pytest
import torch
from helpers.ops import assert_near, error, random_ssd, with_outputs
from torch import Tensor

from fast_llm_ssm.ops import ssd
from fast_llm_ssm.ops.ssd.definition import ssd_definition

CHUNK = 8
TIMED = ("x", "dt", "B", "C", "z")
LENGTHS = [[7, 13], [8, 12], [9, 11], [1, 1, 1, 17], [5, 1, 9, 1, 4], [20], [1] * 20, [3, 16, 1]]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def numbers(lengths: list[int], first: int = 0) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None] * 2 + first


def packed(inputs: dict[str, Tensor], **documents: Tensor) -> tuple[Tensor, Tensor]:
    return ssd(**inputs, **documents, chunk_size=CHUNK, dt_softplus=True, return_final_states=True)  # type: ignore[arg-type, return-value]


def separate(inputs: dict[str, Tensor], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The definition on each document of a batch of one, with its own initial state."""
    outputs, states, start = [], [], 0
    for document, length in enumerate(lengths):
        span = slice(start, start + length)
        own = {name: tensor[:, span] if name in TIMED else tensor for name, tensor in inputs.items()}
        own["initial_states"] = inputs["initial_states"][[document]]
        y, state = ssd_definition(**own, dt_softplus=True)
        outputs.append(y)
        states.append(state)
        start += length
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.mark.parametrize("lengths", [*LENGTHS, [0, 20], [6, 0, 0, 14], [20, 0], [0, 0, 20, 0]], ids=str)
def test_cu_seqlens_equals_separate_documents_each_with_its_states(lengths: list[int]) -> None:
    inputs = random_ssd(1, sum(lengths), states=len(lengths))
    got = with_outputs(packed(inputs, cu_seqlens=cumulative(lengths)), inputs)
    assert_near(got, with_outputs(separate(inputs, lengths), inputs), 1e-11)


def test_an_empty_document_hands_its_initial_state_on() -> None:
    inputs = random_ssd(1, 20, states=3)
    _, states = packed(inputs, cu_seqlens=cumulative([12, 0, 8]))
    assert torch.equal(
        states[1],
        inputs["initial_states"][1].float().double() if states.dtype == torch.float32 else inputs["initial_states"][1],
    )


@pytest.mark.parametrize("first", [0, 5, -3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_seq_idx_equals_separate_documents_and_the_state_seeds_the_first(lengths: list[int], first: int) -> None:
    inputs = random_ssd(1, sum(lengths))
    y, state = packed(inputs, seq_idx=numbers(lengths, first))
    zeros = torch.zeros(len(lengths) - 1, *state.shape[1:], dtype=state.dtype)
    seeded = {**inputs, "initial_states": torch.cat([inputs["initial_states"], zeros])}
    expected, states = separate(seeded, lengths)
    got = with_outputs((y, state), inputs)
    assert_near(got, with_outputs((expected, states[-1:]), inputs), 1e-11)


def test_every_row_has_its_own_documents() -> None:
    inputs = random_ssd(3, 20)
    rows = [[7, 13], [20], [2, 9, 9]]
    y, states = packed(inputs, seq_idx=torch.cat([numbers(lengths) for lengths in rows]))
    for row, lengths in enumerate(rows):
        own = {name: tensor[[row]] if name in (*TIMED, "initial_states") else tensor for name, tensor in inputs.items()}
        alone, state = packed(own, seq_idx=numbers(lengths))
        assert error(y[[row]], alone) < 1e-12
        assert error(states[[row]], state) < 1e-12


@pytest.mark.parametrize("kind", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("boundary", [1, CHUNK - 1, CHUNK, CHUNK + 1, 19])
def test_a_document_cannot_see_another(boundary: int, kind: str) -> None:
    """Another last token of document A leaves B bit-identical, and B's loss has no gradient in A."""
    lengths = [boundary, 20 - boundary]
    documents = {kind: numbers(lengths) if kind == "seq_idx" else cumulative(lengths)}
    inputs = random_ssd(1, 20, dtype=torch.float32, states=1 if kind == "seq_idx" else 2)
    y, _ = packed(inputs, **documents)
    changed = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    for name in TIMED:
        changed[name][:, boundary - 1] = 1e4
    assert torch.equal(packed(changed, **documents)[0][:, boundary:], y[:, boundary:])
    timed = [inputs[name] for name in TIMED]
    for grad in torch.autograd.grad(y[:, boundary:].square().sum(), timed):
        assert not grad[:, :boundary].any()
        assert grad[:, boundary:].any()


def test_a_document_whose_values_are_not_finite_leaves_others_clean() -> None:
    inputs = random_ssd(1, 20, states=2)
    with torch.no_grad():
        inputs["x"][:, :9] = float("nan")
    y, _ = packed(inputs, cu_seqlens=cumulative([9, 11]))
    assert torch.isfinite(y[:, 9:]).all()


@pytest.mark.parametrize(
    "documents, message",
    [
        ({"seq_idx": torch.zeros(2, 20), "cu_seqlens": torch.tensor([0, 20])}, "expected one of them"),
        ({"seq_idx": torch.tensor([[0] * 10 + [1] * 5 + [0] * 5] * 2)}, "must not decrease"),
        ({"seq_idx": torch.zeros(2, 19)}, "seq_idx is"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "for a batch of 2"),
    ],
)
def test_wrong_documents_are_refused(documents: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed(random_ssd(2, 20), **documents)


@pytest.mark.parametrize("bounds", [[0, 10], [1, 20], [0, 12, 8, 20]])
def test_wrong_cumulative_lengths_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must"):
        packed(random_ssd(1, 20, states=len(bounds) - 1), cu_seqlens=torch.tensor(bounds))
