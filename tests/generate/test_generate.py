from __future__ import annotations

import pytest
import torch
from helpers.models import ATTENTION, MAMBA2, build, shared_hybrid, stack, tokens

from fast_llm_ssm.generate import SamplingOptions, decode, generate, sample


def test_greedy_equals_recomputing_everything():
    model = build(shared_hybrid())
    prompt = tokens(1, 9)[0].tolist()
    expected = list(prompt)
    for _ in range(12):
        expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert generate(model, [prompt], 12) == [expected[9:]]


def test_rows_together_equal_rows_alone():
    model = build(stack(MAMBA2, ATTENTION))
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (1, 7, 20)]
    assert generate(model, prompts, 8) == [generate(model, [prompt], 8)[0] for prompt in prompts]


def test_a_long_prompt_is_taken_in_pieces(monkeypatch):
    model = build(shared_hybrid())
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (4, 23)]
    expected = generate(model, prompts, 8)
    monkeypatch.setattr("fast_llm_ssm.generate.decoding._PREFILL_TOKENS", 10)
    assert generate(model, prompts, 8) == expected


def test_a_row_ends_at_a_stop_token_and_the_others_go_on():
    model = build(stack(MAMBA2))
    prompts = [[1, 2], [3]]
    free = generate(model, prompts, 6)
    stop = free[0][1]
    rows = generate(model, prompts, 6, stop_ids=[stop])
    assert rows[0] == free[0][: free[0].index(stop) + 1]
    assert rows[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])


def test_padded_rows_of_the_vocabulary_are_never_drawn():
    model = build(stack(MAMBA2, pad_vocab_multiple=64, tie_embeddings=False))
    with torch.no_grad():
        model.head.weight[37:].fill_(10.0)
    (row,) = generate(model, [[1]], 40, SamplingOptions(temperature=5.0))
    assert max(row) < 37


def test_seed_decides_the_draws():
    model = build(stack(MAMBA2))
    draws = [generate(model, [[1]], 20, SamplingOptions(temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(2000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits, SamplingOptions(temperature=1.0, top_k=2), generator)
    assert set(drawn.tolist()) == {1, 3}
    assert 0.5 < (drawn == 1).float().mean() < 0.65  # 4 / 7
    assert set(sample(logits, SamplingOptions(temperature=1.0, top_p=0.35), generator).tolist()) == {1}
    assert set(sample(logits, SamplingOptions(temperature=1.0, top_p=0.85), generator).tolist()) == {1, 2, 3}
    hot = sample(logits, SamplingOptions(temperature=10.0), generator)
    assert (hot == 0).float().mean() > 0.2


@pytest.mark.parametrize(
    "options, name", [({"temperature": -1.0}, "temperature"), ({"top_k": -1}, "top_k"), ({"top_p": 0.0}, "top_p")]
)
def test_options_out_of_range(options, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        SamplingOptions(**options)


def test_bad_prompts():
    model = build(stack(MAMBA2))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        list(decode(model, [[1], []], 3))
    with pytest.raises(ValueError, match="prompt 0 holds token 37"):
        list(decode(model, [[1, 37]], 3))
