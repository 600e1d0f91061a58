from __future__ import annotations

import pytest
from helpers.serving import TALKER, save_checkpoint

from fast_llm_ssm.cli import main
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.data.tokenizer import ByteTokenizer
from fast_llm_ssm.generate import SamplingOptions, generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "talker")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    output = capsys.readouterr()
    return exited.value.code or 0, output.out, output.err


def test_text_and_ids(folder, capsys):
    tokenizer, model = ByteTokenizer(), load_model(folder)
    prompt = tokenizer.encode_prompt("Hello")
    (greedy,) = generate(model, [prompt], 12)
    (drawn,) = generate(model, [prompt], 12, SamplingOptions(1.5, 50, 0.9, 4, 1.2))
    common = ["generate", "--checkpoint", str(folder), "--device", "cpu", "--max-new-tokens", "12"]
    assert run(capsys, *common, "--prompt", "Hello") == (0, tokenizer.decode(greedy) + "\n", "")
    options = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", "4", "--repetition-penalty", "1.2"]
    ids = " ".join(map(str, prompt))
    expected = " ".join(map(str, drawn)) + "\n"
    assert run(capsys, *common, "--prompt", ids, "--token-ids", *options) == (0, expected, "")
    text = tokenizer.decode(greedy)
    assert run(capsys, *common, "--prompt", "Hello", "--stop", text[4:7])[1] == text[: text.index(text[4:7])] + "\n"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prompt", "a", "--temperature", "-1"], "--temperature: got -1.0, expected a number of at least 0"),
        (["--prompt", "a", "--top-p", "2"], "--top-p: got 2.0"),
        (["--prompt", "a b", "--token-ids"], "--prompt: got 'a b', expected token ids"),
        (["--prompt", "1 999", "--token-ids"], "--prompt: got token 999, expected ids from 0 to 257"),
        (["--prompt", "1", "--token-ids", "--stop", "x"], "--stop: got a text, expected none beside --token-ids"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, options, message):
    code, _, error = run(capsys, "generate", "--checkpoint", str(folder), "--device", "cpu", *options)
    assert code == 2 and message in error and error.count("\n") == 1


def test_bench_generate(folder, tmp_path, capsys):
    options = ["--device", "cpu", "--prompt-length", "5", "--new-tokens", "4", "--repeats", "1"]
    code, out, _ = run(
        capsys, "bench-generate", "--checkpoint", str(folder), *options, "--batch-size", "1", "--batch-size", "3"
    )
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["1", "5", "4"], ["3", "5", "4"]]
    assert all(float(row[3]) > 0 and float(row[7]) > 0 for row in rows)
    (tmp_path / "run.yaml").write_text("model: " + str(TALKER).replace("'", '"').replace("False", "false"))
    assert run(capsys, "bench-generate", "--config", str(tmp_path / "run.yaml"), *options)[0] == 0
    assert run(capsys, "bench-generate", *options)[::2] == (2, "expected one of --checkpoint and --config\n")
