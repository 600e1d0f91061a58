"""The real server in a process of its own, asked by a real HTTP client."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.serving import save_checkpoint, server

from fast_llm_ssm.cli import main
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.data.tokenizer import ByteTokenizer
from fast_llm_ssm.generate import SamplingOptions, generate

LIMITS = ["--max-input-length", "40", "--max-total-tokens", "3000", "--max-batch-size", "8"]
LIMITS += ["--max-batch-prefill-tokens", "16", "--max-concurrent-requests", "80"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "talker")


@pytest.fixture(scope="module")
def client(folder) -> Iterator[httpx.Client]:
    with server(folder, *LIMITS) as client:
        yield client


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"fast_llm_{name}"))


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events."""
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ask(client: httpx.Client, text: str, **parameters: Any) -> str:
    response = client.post("/generate", json={"inputs": text, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()["generated_text"]


def test_what_the_server_says_of_itself(client):
    assert client.get("/health").status_code == 200
    info = client.get("/info").json()
    assert info["model_id"] == "talker" and info["max_input_length"] == 40 and info["max_total_tokens"] == 3000
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "# TYPE fast_llm_requests_running gauge" in response.text
    assert "access-control-allow-origin" not in client.get("/info", headers={"Origin": "http://elsewhere"}).headers


def test_a_greedy_answer_is_the_model_s_and_tells_its_tokens(client, folder):
    parameters = {"max_new_tokens": 12, "details": True, "top_n_tokens": 2}
    answer = client.post("/generate", json={"inputs": "Hello", "parameters": parameters}).json()
    tokenizer = ByteTokenizer()
    (expected,) = generate(load_model(folder), [tokenizer.encode_prompt("Hello")], 12)
    details = answer["details"]
    assert [token["id"] for token in details["tokens"]] == expected
    assert answer["generated_text"] == tokenizer.decode(expected)
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 12, None)
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 2 and top[0]["id"] == token["id"] and top[0]["logprob"] == token["logprob"] < 0


def test_a_stream_joins_to_the_whole_answer(client):
    parameters = {"max_new_tokens": 40, "temperature": 1.2, "seed": 7, "details": True}
    body = {"inputs": "Příliš 🦙 안녕", "parameters": parameters}
    whole = client.post("/generate", json=body).json()
    stream = events(client, "/generate_stream", body)
    assert [event["index"] for event in stream] == list(range(1, 41))
    assert "".join(event["token"]["text"] for event in stream) == whole["generated_text"]
    assert [event["token"] for event in stream] == whole["details"]["tokens"]
    assert all(event["generated_text"] is None for event in stream[:-1])
    assert stream[-1]["generated_text"] == whole["generated_text"]
    assert stream[-1]["details"] == {key: whole["details"][key] for key in stream[-1]["details"]}
    assert whole["details"]["seed"] == 7
    assert client.post("/", json=body).json() == whole
    assert events(client, "/", body | {"stream": True}) == stream


def test_parameters_change_the_answer_as_they_should(client):
    free = ask(client, "abc", max_new_tokens=20, temperature=2.0, seed=1)
    assert ask(client, "abc", max_new_tokens=20, temperature=2.0, seed=1) == free
    assert ask(client, "abc", max_new_tokens=20, temperature=2.0, seed=2) != free
    stop = free[5:8]
    assert ask(client, "abc", max_new_tokens=20, temperature=2.0, seed=1, stop=[stop]) == free[: free.index(stop)]
    assert ask(client, "abc", max_new_tokens=5, top_k=1) == ask(client, "abc", max_new_tokens=5)
    assert ask(client, "abc", max_new_tokens=5, return_full_text=True) == "abc" + ask(client, "abc", max_new_tokens=5)
    cut = ask(client, "a" * 100 + "bc", max_new_tokens=9, truncate=2)
    assert (
        cut
        == client.post("/v1/completions", json={"prompt": list(b"bc"), "max_tokens": 9, "temperature": 0}).json()[
            "choices"
        ][0]["text"]
    )


def test_completions(client):
    body = {"model": "talker", "prompt": ["one", "two"], "max_tokens": 6, "temperature": 0, "logprobs": 2}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == [
        ask(client, p, max_new_tokens=6) for p in ("one", "two")
    ]
    assert answer["object"] == "text_completion" and answer["model"] == "talker"
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20}
    log_probs = answer["choices"][0]["logprobs"]
    assert all(len(log_probs[key]) == 6 for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    stream = events(client, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert stream[-1] == "[DONE]" and stream[-2]["usage"] == answer["usage"] and stream[-2]["choices"] == []
    for index, choice in enumerate(answer["choices"]):
        parts = [part for event in stream[:-2] for part in event["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"


BAD = [
    ("/generate", b"", 400, "the body is not JSON"),
    ("/generate", b'{"inputs": "a"', 400, "the body is not JSON"),
    ("/generate", b"[" * 100_000, 400, "nested too deeply"),
    ("/generate", b"[1]", 422, "expected an object"),
    ("/generate", {}, 422, "inputs: missing key"),
    ("/generate", {"inputs": ""}, 422, 'inputs: got "", expected text with at least 1 character'),
    ("/generate", {"inputs": "a" * 50}, 422, "inputs: got 51 tokens, expected at most 40 (--max-input-length)"),
    ("/generate", {"inputs": "a", "stream": True}, 422, "stream: got true"),
    ("/generate", {"inputs": "a", "parameters": {"max_new_token": 3}}, 422, "parameters.max_new_token: unknown key"),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 0}}, 422, "parameters.max_new_tokens: got 0"),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3000}}, 422, "parameters.max_new_tokens: got 3000"),
    ("/generate", {"inputs": "a", "parameters": {"temperature": 0}}, 422, "parameters.temperature: got 0"),
    (
        "/generate",
        b'{"inputs": "a", "parameters": {"temperature": 1e999}}',
        422,
        "temperature: got .inf, expected a finite number",
    ),
    ("/generate", {"inputs": "a", "parameters": {"grammar": {}}}, 422, "parameters.grammar: got {}, which is not"),
    ("/generate", b'{"inputs": "\\ud83e"}', 422, "half of a surrogate pair"),
    ("/generate_stream", {"inputs": "a", "parameters": {"top_p": 1.5}}, 422, "parameters.top_p: got 1.5"),
    ("/v1/completions", {"prompt": ""}, 422, "prompt: got an empty one"),
    ("/v1/completions", {"prompt": []}, 422, "prompt: got an empty list"),
    ("/v1/completions", {"prompt": [[1], []]}, 422, "prompt: got an empty one"),
    ("/v1/completions", {"prompt": [1, 258]}, 422, "prompt: got token 258, expected ids from 0 to 257"),
    ("/v1/completions", {"prompt": [-1]}, 422, "prompt: got token -1"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 422, "max_tokens: got 0"),
    ("/v1/completions", {"prompt": "a", "max_token": 1}, 422, "max_token: unknown key, did you mean `max_tokens`?"),
    ("/v1/completions", {"prompt": "a", "n": 2}, 422, "n: got 2, which is not supported"),
    ("/v1/completions", {"prompt": ["a"] * 81}, 429, "expected at most 80 at once"),
    ("/generate", b'{"inputs": "' + b"a" * 2_000_000 + b'"}', 413, "the body has more than 1048576 bytes"),
]


@pytest.mark.parametrize("path, body, status, message", BAD, ids=range(len(BAD)))
def test_a_bad_request_gets_one_sentence_and_the_next_one_works(client, path, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    error = error if isinstance(error, str) else error["message"]
    assert message in error and "\n" not in error
    assert client.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 1}}).status_code == 200


def test_extreme_options_hurt_nobody(client):
    for options in [
        {"top_k": 10**30, "do_sample": True},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"repetition_penalty": 1e-300, "do_sample": True},
        {"repetition_penalty": 1e300},
        {"seed": 10**30, "do_sample": True},
        {"top_p": 1e-300},
    ]:
        ask(client, "abc", max_new_tokens=3, **options)
    assert client.get("/health").status_code == 200


def test_pages_of_other_origins_are_refused(client):
    assert (
        client.post("/generate", content=b'{"inputs": "a"}', headers={"Content-Type": "text/plain"}).status_code == 415
    )
    response = client.post("/generate", json={"inputs": "a"}, headers={"Host": "rebound.example:80"})
    assert response.status_code == 403 and "Host: got 'rebound.example'" in response.json()["error"]
    assert client.get("/generate").status_code == 405 and client.get("/nothing").status_code == 404


@pytest.mark.parametrize(
    "path, body",
    [
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2900}}),
        ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 2900}}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2900, "stream": True}),
    ],
)
def test_a_client_that_vanishes_frees_its_slot(client, path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_for(lambda: metric(client, "requests_running ") > 0)
    wait_for(lambda: metric(client, "requests_running ") == 0, seconds=5)
    assert metric(client, f'requests_total{{endpoint="{path}",status="499"}}') >= 1


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths and options."""
    options = [{}, {"temperature": 1.0, "seed": 5}, {"top_k": 9, "top_p": 0.8, "seed": 6}, {"repetition_penalty": 1.3}]
    return [
        {
            "inputs": "ab🦙 안녕 kůň"[: 1 + i % 10] * (1 + i % 2),
            "parameters": {"max_new_tokens": 1 + (i * 7) % 23, "details": True, **options[i % 4]},
        }
        for i in range(count)
    ]


def load(client: httpx.Client, count: int, clients: int) -> None:
    """Many clients at once; every answer must be the one that the same request gets alone."""
    kinds = bodies(20)
    alone = [client.post("/generate", json=body).json() for body in kinds]
    limits = httpx.Limits(max_connections=clients)
    with (
        httpx.Client(base_url=client.base_url, timeout=300, limits=limits) as many,
        ThreadPoolExecutor(clients) as pool,
    ):

        def one(i: int) -> None:
            body, expected = kinds[i % 20], alone[i % 20]
            if i % 3:
                response = many.post("/generate", json=body)
                assert response.status_code == 200 and response.json() == expected
            else:
                stream = events(many, "/generate_stream", body)
                assert [event["token"] for event in stream] == expected["details"]["tokens"]
                assert stream[-1]["generated_text"] == expected["generated_text"]

        list(pool.map(one, range(count)))


def test_many_clients_at_once_get_what_each_would_get_alone(client):
    load(client, 40, 16)


def resident(client: httpx.Client) -> int:
    """MiB of the server's memory."""
    status = Path(f"/proc/{client.headers['x-process']}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) >> 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_a_thousand_requests_of_64_clients(client):
    load(client, 200, 64)
    before = resident(client)
    load(client, 1000, 64)
    assert resident(client) - before < 30
    assert metric(client, "requests_running ") == metric(client, "requests_waiting ") == 0


def test_a_server_with_a_key_a_time_limit_and_an_end(folder):
    options = ["--request-timeout", "3", "--max-total-tokens", "30000", "--max-batch-size", "1", "--host", "127.0.0.2"]
    with server(folder, *options, FAST_LLM_API_KEY="secret") as client:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 29000}}
        assert client.post("/generate", json=body).status_code == 401
        assert client.get("/info").status_code == 401 and client.get("/health").status_code == 200
        client.headers["Authorization"] = "Bearer secret"
        response = client.post("/generate", json=body)
        assert response.status_code == 504 and "--request-timeout" in response.json()["error"]
        last = events(client, "/generate_stream", body)[-1]
        assert last["error_type"] == "timeout"
        wait_for(lambda: metric(client, "requests_running ") == 0)

        # A signal ends the server, but not before the answers in flight.
        statuses: list[int] = []
        body = {"inputs": "a", "parameters": {"max_new_tokens": 8}}
        thread = threading.Thread(target=lambda: statuses.append(client.post("/generate", json=body).status_code))
        thread.start()
        wait_for(lambda: metric(client, "requests_running ") > 0 or bool(statuses))
        os.kill(int(client.headers["x-process"]), signal.SIGTERM)
        thread.join(timeout=30)
        assert statuses == [200]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--host", "0.0.0.0"], "--host: got 0.0.0.0, expected an API key beside it, or a loopback address"),
        (["--port", "65536"], "--port: got 65536"),
        (["--max-input-length", "2048"], "--max-input-length: got 2048, expected less than max_total_tokens (2048)"),
        (["--device", "nowhere"], "--device: got 'nowhere'"),
        (["--dtype", "fp8"], "--dtype: got 'fp8', expected fp32 or bf16"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(folder, capsys, options, message):
    with pytest.raises(SystemExit) as exited:
        main(["serve", "--checkpoint", str(folder), *options])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_address_in_use_and_a_model_without_tokenizer(folder, tmp_path, capsys):
    bare = save_checkpoint(tmp_path / "bare", tokenizer=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for path, message in [(folder, "cannot listen on 127.0.0.1 port"), (bare, "has no tokenizer")]:
            with pytest.raises(SystemExit) as exited:
                main(["serve", "--checkpoint", str(path), "--port", str(taken.getsockname()[1])])
            assert exited.value.code == 2 and message in capsys.readouterr().err


def test_greedy_options_are_the_default():
    from fast_llm_ssm.generate.server.bodies import Parameters

    assert Parameters().sampling().temperature == SamplingOptions().temperature == 0
    assert Parameters(do_sample=True).sampling().temperature == 1
    assert Parameters(top_p=0.5).sampling().temperature == 1
