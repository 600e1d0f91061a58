from __future__ import annotations

import pytest
import torch
from helpers.models import ATTENTION, MAMBA2, MIXERS, build, shared_hybrid, stack, tokens

from fast_llm_ssm.data.tokenizer import ByteTokenizer
from fast_llm_ssm.generate import Engine, Request, SamplingOptions, Token
from fast_llm_ssm.generate.engine import Job

WINDOW = MIXERS["attention with window"]
MODELS = {"mamba2": stack(MAMBA2, MAMBA2), "shared hybrid": shared_hybrid(), "window": stack(MAMBA2, WINDOW, ATTENTION)}


def prompt_of(length: int, seed: int) -> list[int]:
    return tokens(1, length, seed=seed)[0].tolist()


def mixed_requests(count: int) -> list[Request]:
    """Requests of many lengths and options."""
    options = [
        SamplingOptions(),
        SamplingOptions(temperature=1.0, seed=1),
        SamplingOptions(temperature=0.8, top_k=8, top_p=0.9, seed=2),
        SamplingOptions(temperature=1.5, repetition_penalty=1.2, seed=3),
    ]
    lengths = [1, 7, 150, 2, 33, 64, 5]
    return [
        Request(prompt_of(lengths[i % 7], seed=i), 2 + 3 * (i % 4), options[i % 4], log_probs=True, top_log_probs=i % 3)
        for i in range(count)
    ]


def run(engine: Engine, requests: list[Request], arrive: int = 100) -> list[list[Token]]:
    """Everything that each request gets, `arrive` of them arriving a round."""
    answers: list[list[Token]] = [[] for _ in requests]
    pairs = list(zip(requests, answers, strict=True))
    while pairs or engine.busy:
        for request, answer in pairs[:arrive]:
            engine.submit(request, answer.append)
        del pairs[:arrive]
        engine.step()
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_a_request_gives_the_same_alone_and_in_any_company(name):
    model = build(MODELS[name])
    requests = mixed_requests(18)
    engine = Engine(model, slots=18, max_length=180, prefill_tokens=100)
    together = run(engine, requests)
    trickling = run(Engine(model, slots=3, max_length=180, prefill_tokens=100), requests[:6], arrive=1)
    alone = [run(engine, [request])[0] for request in requests[::3]]
    assert together[::3] == alone and trickling == together[:6]  # ids, and log-probabilities to the last bit


def test_a_long_neighbour_changes_no_bit_either():
    model = build(MODELS["window"])
    short, long = (Request(prompt_of(n, n), 6, log_probs=True) for n in (10, 1030))
    engine = Engine(model, slots=3, max_length=1200)
    together = run(engine, [short, long])
    assert together == [run(engine, [request])[0] for request in (short, long)]


@pytest.mark.parametrize("name", MODELS)
def test_memory_filled_with_nan_before_use_changes_nothing(name):
    model = build(MODELS[name])
    requests = mixed_requests(6)
    expected = run(Engine(model, slots=3, max_length=180), requests)
    engine = Engine(model, slots=3, max_length=180)
    for tensor in engine.state.tensors():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    assert run(engine, requests) == expected


def test_the_engine_equals_reading_everything_again():
    model = build(shared_hybrid())
    (answer,) = run(Engine(model), [Request(prompt_of(20, 3), 10, log_probs=True)])
    ids = [*prompt_of(20, 3), *(token.id for token in answer)]
    log_probs = model(torch.tensor([ids])).log_softmax(-1)[0]
    assert [token.id for token in answer] == log_probs[19:-1].argmax(-1).tolist()
    expected = log_probs[range(19, 29), ids[20:]].tolist()
    assert [token.log_prob for token in answer] == pytest.approx(expected, abs=1e-4)


def test_a_long_prompt_is_read_in_pieces_while_others_go_on():
    model = build(stack(MAMBA2, ATTENTION))
    engine = Engine(model, prefill_tokens=10)
    short: list[Token] = []
    long: list[Token] = []
    engine.submit(Request([1, 2], 50), short.append)
    engine.step()
    engine.submit(Request(prompt_of(95, 0), 5), long.append)
    for read in range(9):
        engine.step()
        assert len(short) == 3 + read and not long
    engine.step()
    assert len(long) == 2  # one from the prompt, one from the step of the same round


@pytest.mark.parametrize("piece", [8, 13, 150, 299, 300])
def test_the_pieces_of_a_prompt_don_t_matter(piece):
    model = build(shared_hybrid())
    request = Request(prompt_of(300, 5), 12)
    (whole,) = run(Engine(model, max_length=320), [request])
    (pieces,) = run(Engine(model, max_length=320, prefill_tokens=piece), [request])
    assert [token.id for token in pieces] == [token.id for token in whole]


def test_slots_are_freed_and_used_again():
    model = build(stack(MAMBA2))
    engine = Engine(model, slots=2)
    answers: list[list[Token]] = [[] for _ in range(5)]
    for i, answer in enumerate(answers):
        engine.submit(Request([i], 4), answer.append)
    seen = set()
    while engine.busy:
        engine.step()
        seen.add(engine.num_running)
    assert [len(answer) for answer in answers] == [4] * 5 and max(seen) == 2
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_a_cancelled_request_leaves_at_once_and_the_others_don_t_notice():
    model = build(shared_hybrid())
    requests = [Request(prompt_of(n, n), 12) for n in (3, 9, 5)]
    expected = run(Engine(model), requests)
    engine = Engine(model)
    answers: list[list[Token]] = [[] for _ in requests]
    jobs: list[Job] = [engine.submit(r, a.append) for r, a in zip(requests, answers, strict=True)]
    for _ in range(5):
        engine.step()
    jobs[0].cancel()
    given = len(answers[0])
    while engine.busy:
        engine.step()
    assert len(answers[0]) == given < 12 and answers[1:] == expected[1:]
    waiting = engine.submit(requests[0], answers[0].append)
    waiting.cancel()
    engine.step()
    assert not engine.busy and len(answers[0]) == given


def test_stop_strings_and_tokens_end_a_request():
    model = build(stack(MAMBA2, vocab_size=258))
    engine = Engine(model, tokenizer=ByteTokenizer())
    prompt = list(b"abc")
    options = SamplingOptions(temperature=3.0, seed=1)
    (free,) = run(engine, [Request(prompt, 60, options)])
    text = "".join(token.text for token in free)
    assert free[-1].finish == "length" and [token.finish for token in free[:-1]] == [None] * 59
    stop = text[20:23]
    (answer,) = run(engine, [Request(prompt, 60, options, stop=["never seen", stop])])
    assert "".join(token.text for token in answer) == text[: text.index(stop)]
    assert answer[-1].finish == "stop_string"
    last = free[9].id
    (answer,) = run(engine, [Request(prompt, 60, options, stop_ids={last})])
    assert answer[-1].finish == "stop_token" and answer[-1].id == last
    assert [token.id for token in answer] == [token.id for token in free][: len(answer)]


def test_what_cannot_be_answered_is_refused_by_name():
    engine = Engine(build(stack(MAMBA2)), max_length=10)
    for request, message in [
        (Request([], 1), "prompt: got an empty one"),
        (Request([37], 1), "prompt: got token 37, expected ids from 0 to 36"),
        (Request([-1], 1), "prompt: got token -1"),
        (Request([1], 0), "max_new_tokens: got 0, expected at least 1"),
        (Request([1] * 6, 5), "max_new_tokens: got 5 after a prompt of 6 tokens, expected at most 10 tokens together"),
        (Request([1], 1, stop=["x"]), "stop: got strings, but the model has no tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(request, print)
    assert not engine.busy
