"""A prompt read in two or three pieces leaves the state that reading it at once leaves, in every kind of model."""

from __future__ import annotations

import pytest
import torch
from helpers.models import ATTENTION, MAMBA2, MIXERS, build, shared_hybrid, stack, tokens

from fast_llm_ssm.model import DecodingState, HybridModel

LENGTH, CHUNK = 300, 8
SPLITS = [[n] for n in (1, 2, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH - 1)] + [[100, 200]]
MODELS = {
    "mamba2": stack(MAMBA2, MAMBA2),
    "shared hybrid": shared_hybrid(),
    "window": stack(MAMBA2, MIXERS["attention with window"], ATTENTION),
}


def read(model: HybridModel, prompt: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, DecodingState]:
    state = model.new_state(1, LENGTH + 20)
    for piece in prompt.tensor_split(splits, dim=1):
        logits = model.prefill(piece, state)
    return logits, state


def greedy(model: HybridModel, logits: torch.Tensor, state: DecodingState) -> list[int]:
    drawn = []
    for _ in range(20):
        token = logits.argmax(-1)
        drawn.append(int(token))
        logits = model.step(token, state)
    return drawn


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_states_equal_those_of_one_piece(name):
    model, prompt = build(MODELS[name]), tokens(1, LENGTH)
    expected, whole = read(model, prompt, [])
    before = [tensor.clone() for tensor in whole.tensors()]
    continuation = greedy(model, expected, whole)
    for splits in SPLITS:
        logits, state = read(model, prompt, splits)
        for got, want in zip([logits, *state.tensors()], [expected, *before], strict=True):
            bound = 5e-5 * max(1.0, float(want.abs().max()))
            torch.testing.assert_close(got, want, rtol=0, atol=bound, msg=lambda text, at=splits: f"{at}: {text}")
        assert greedy(model, logits, state) == continuation


@pytest.mark.parametrize("name", ["mamba2", "window"])
@torch.no_grad()
def test_steps_equal_the_forward_pass_over_300_tokens(name):
    model, prompt = build(MODELS[name]), tokens(1, LENGTH)
    expected = model(prompt)[0]
    state = model.new_state(1, LENGTH)
    steps = torch.cat([model.step(prompt[:, t], state) for t in range(LENGTH)])
    torch.testing.assert_close(steps, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_rows_of_a_state_are_views_and_can_be_copied():
    model = build(shared_hybrid())
    logits, source = read(model, tokens(1, LENGTH), [])
    state = model.new_state(3, LENGTH + 20)
    for tensor in state.tensors():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 7)
    state.copy_row(1, source, 0)
    part = state.rows(1, 2)
    assert greedy(model, logits, part) == greedy(model, logits, source)
    assert state.lengths.tolist() == [7, LENGTH + 20, 7]
    assert state.num_bytes == 3 * source.num_bytes
