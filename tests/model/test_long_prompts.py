"""A prompt of 300 tokens gives the same however it is cut, stepped through, or batched."""

from __future__ import annotations

import pytest
import torch
from helpers.models import ATTENTION, MAMBA, MAMBA2, MIXERS, build, shared_hybrid, stack, tokens

from fast_llm_ssm.model import HybridModel

LENGTH, CONTINUED, CHUNK = 300, 20, 8
SCALE = 5e-5  # of the largest value: what fp32 leaves between two orders of the same sums

MODELS = {
    "mamba": stack(MAMBA, MIXERS["mamba with norms"]),
    "mamba2": stack(MAMBA2, MIXERS["mamba2 gate after norm"]),
    "shared hybrid": shared_hybrid(pattern="mhh"),
    "windows": stack(MAMBA2, MIXERS["attention with window"], MAMBA, {**ATTENTION, "window": 64}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> HybridModel:
    return build(MODELS[request.param]).requires_grad_(False)


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.isfinite().all() and (a - b).abs().max() <= SCALE * b.abs().max().clamp(min=1.0)


def read(model: HybridModel, ids: torch.Tensor, *cuts: int):
    """The logits after the prompt, the states, and the likeliest tokens that follow."""
    state = model.new_state(len(ids), LENGTH + CONTINUED)
    for start, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        logits = model.prefill(ids[:, start:end], state)
    states = [tensor.clone() for tensor in state.tensors()]
    return logits, states, follow(model, logits, state)


def follow(model: HybridModel, logits: torch.Tensor, state) -> list[list[int]]:
    chosen = []
    for _ in range(CONTINUED):
        chosen.append(logits.argmax(-1))
        logits = model.step(chosen[-1], state)
    return torch.stack(chosen, 1).tolist()


def test_any_cut_leaves_the_same_logits_states_and_tokens(model: HybridModel) -> None:
    ids = tokens(1, LENGTH)
    logits, states, following = read(model, ids)
    for cuts in ((1,), (2,), (3,), (4,), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (299,), (100, 200)):
        cut_logits, cut_states, cut_following = read(model, ids, *cuts)
        assert_close(cut_logits, logits)
        for cut, whole in zip(cut_states, states, strict=True):
            assert_close(cut, whole)
        assert cut_following == following


def test_steps_equal_the_forward_pass_at_every_length(model: HybridModel) -> None:
    ids = tokens(1, LENGTH)
    expected = model(ids)
    state = model.new_state(1, LENGTH)
    for t in range(LENGTH):
        assert_close(model.step(ids[:, t], state), expected[:, t])


def test_prompts_of_many_lengths_in_one_batch_equal_each_alone(model: HybridModel) -> None:
    prompts = [tokens(1, length, seed=length) for length in (1, 7, LENGTH)]
    ids = torch.zeros(3, LENGTH, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : prompt.shape[1]] = prompt[0]
        mask[row, : prompt.shape[1]] = 1
    state = model.new_state(3, LENGTH + CONTINUED)
    logits = model.prefill(ids, state, mask)
    following = follow(model, logits, state)
    for row, prompt in enumerate(prompts):
        alone, _, alone_following = read(model, prompt)
        assert_close(logits[row], alone[0])
        assert following[row] == alone_following[0]


def test_memory_that_held_nan_changes_nothing(model: HybridModel) -> None:
    ids = tokens(1, LENGTH)
    _, states, following = read(model, ids)
    used = model.new_state(3, LENGTH + CONTINUED)
    for tensor in used.tensors():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    used.copy_row(1, model.new_state(1, LENGTH + CONTINUED), 0)
    row = used.rows(1, 2)
    torch.use_deterministic_algorithms(True)  # with which torch fills new memory with NaN
    try:
        logits = model.prefill(ids, row)
        for tensor, expected in zip(row.tensors(), states, strict=True):
            assert torch.equal(tensor, expected)
        assert follow(model, logits, row) == following
    finally:
        torch.use_deterministic_algorithms(False)
