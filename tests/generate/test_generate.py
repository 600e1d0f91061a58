from __future__ import annotations

import pytest
import torch
from helpers.models import ATTENTION, MAMBA2, build, meta_hybrid, shared_hybrid, stack, tokens

from fast_llm_ssm.generate import SamplingOptions, generate
from fast_llm_ssm.generate.sampling import Draws, Sampler, log_probabilities


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return tokens(1, length, seed=seed)[0].tolist()


@pytest.mark.parametrize("config", [shared_hybrid(), meta_hybrid()], ids=["shared blocks", "meta tokens"])
def test_greedy_equals_recomputing_everything(config):
    model = build(config)
    prompt = prompt_of(9)
    expected = list(prompt)
    for _ in range(12):
        expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert generate(model, [prompt], 12) == [expected[9:]]


def test_rows_together_equal_rows_alone():
    model = build(stack(MAMBA2, ATTENTION))
    prompts = [prompt_of(n, seed=n) for n in (1, 7, 20)]
    assert generate(model, prompts, 8) == [generate(model, [prompt], 8)[0] for prompt in prompts]


def test_a_row_ends_at_a_stop_token_and_the_others_go_on():
    model = build(stack(MAMBA2))
    prompts = [[1, 2], [3]]
    free = generate(model, prompts, 6)
    stop = free[0][1]
    rows = generate(model, prompts, 6, stop_ids=[stop])
    assert rows[0] == free[0][: free[0].index(stop) + 1]
    assert rows[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(temperature=5.0)])
def test_padded_rows_of_the_vocabulary_are_never_drawn(options):
    model = build(stack(MAMBA2, pad_vocab_multiple=64, tie_embeddings=False))
    with torch.no_grad():
        model.head.weight[37:].fill_(10.0)
    (row,) = generate(model, [[1]], 40, options)
    assert max(row) < 37


def test_seed_decides_the_draws():
    model = build(stack(MAMBA2))
    draws = [generate(model, [[1]], 20, SamplingOptions(temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def draw(logits: torch.Tensor, count: int = 2000, **options) -> torch.Tensor:
    """Tokens [count], drawn from the same logits [V] with different seeds."""
    rows = [Draws(SamplingOptions(**options, seed=seed), []) for seed in range(count)]
    return Sampler(rows, len(logits), logits.device)(logits.expand(count, -1))


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    drawn = draw(logits, temperature=1.0, top_k=2)
    assert set(drawn.tolist()) == {1, 3}
    assert 0.5 < (drawn == 1).float().mean() < 0.65  # 4 / 7
    assert set(draw(logits, temperature=1.0, top_p=0.35).tolist()) == {1}
    assert set(draw(logits, temperature=1.0, top_p=0.85).tolist()) == {1, 2, 3}
    assert set(draw(logits, temperature=1.0, top_k=3, top_p=0.5).tolist()) == {1, 3}
    frequency = draw(logits, temperature=1.0).bincount(minlength=4) / 2000
    torch.testing.assert_close(frequency, logits.exp(), rtol=0, atol=0.04)
    assert (draw(logits, temperature=10.0) == 0).float().mean() > 0.2


def test_a_repetition_penalty_weakens_tokens_seen():
    logits = torch.tensor([2.0, 1.9, -1.0, -1.1])
    sampler = Sampler([Draws(SamplingOptions(repetition_penalty=1.5), [0, 2])], 4, logits.device)
    assert [int(sampler(logits[None])) for _ in range(2)] == [1, 0]  # then both were seen: 2 / 1.5 against 1.9 / 1.5
    (drawn,) = generate(build(stack(MAMBA2)), [[1, 2]], 30, SamplingOptions(repetition_penalty=1e9))
    assert len(set(drawn) - {1, 2}) == 30  # all new, while there are new ones


def test_each_row_is_drawn_by_its_own_options():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    options = [
        SamplingOptions(),
        SamplingOptions(temperature=1.0, seed=3),
        SamplingOptions(temperature=0.7, top_k=5, top_p=0.9, seed=4),
        SamplingOptions(temperature=2.0, repetition_penalty=1.3, seed=5),
    ]
    together = Sampler([Draws(o, [7]) for o in options], 50, logits.device)
    alone = [Sampler([Draws(o, [7])], 50, logits.device) for o in options]
    for _ in range(20):
        assert together(logits).tolist() == [int(s(row[None])) for s, row in zip(alone, logits, strict=True)]


def test_log_probabilities():
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log() + 5
    value, best, ids = log_probabilities(logits, torch.tensor([2]), 2)
    torch.testing.assert_close(value.exp(), torch.tensor([0.3]))
    torch.testing.assert_close(best.exp(), torch.tensor([[0.6, 0.3]]))
    assert ids.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "options, name",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_options_out_of_range(options, name):
    with pytest.raises(ValueError, match=f"{name}: got"):
        SamplingOptions(**options)


def test_bad_prompts():
    model = build(stack(MAMBA2))
    with pytest.raises(ValueError, match="prompt 1: prompt: got an empty one"):
        generate(model, [[1], []], 3)
    with pytest.raises(ValueError, match="prompt: got token 37, expected ids from 0 to 36"):
        generate(model, [[1, 37]], 3)
