from __future__ import annotations

import math

import pytest
import torch
from helpers.serving import save_checkpoint

from fast_llm_ssm.cli import main
from fast_llm_ssm.convert.load import load_model
from fast_llm_ssm.data.tokenizer import ByteTokenizer
from fast_llm_ssm.generate.perplexity import score

TEXT = "Příliš žluťoučký kůň úpěl ďábelské ódy."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "talker")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(["evaluate", *arguments])
    output = capsys.readouterr()
    return exited.value.code or 0, output.out, output.err


def nats(folder, context: int | None) -> float:
    """Each target predicted from the tokens before it, at most `context`, one at a time."""
    model, ids = load_model(folder), ByteTokenizer().encode_prompt(TEXT)
    total = 0.0
    with torch.no_grad():
        for i in range(1, len(ids)):
            start = 0 if context is None else max(0, i - context)
            total -= float(model(torch.tensor([ids[start:i]]))[0, -1].log_softmax(-1)[ids[i]])
    return total


def test_one_window_is_the_whole_text(folder, tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    code, out, _ = run(capsys, "--checkpoint", str(folder), "--text", str(tmp_path / "text"), "--device", "cpu")
    values = {line[:14].strip(): float(line[14:].split()[0]) for line in out.splitlines()}
    size, total = len(TEXT.encode()), nats(folder, None)
    assert code == 0 and values["tokens"] == size  # the first byte too, since a token begins the text
    assert values["perplexity"] == pytest.approx(math.exp(total / size), rel=1e-4)
    assert values["bits per byte"] == pytest.approx(total / math.log(2) / size, abs=1e-3)


def test_windows_overlap_and_count_every_target_once(folder):
    model, ids = load_model(folder), ByteTokenizer().encode_prompt(TEXT)
    whole = score(model, ids, 100, 100)
    assert score(model, ids, len(ids) - 1, 1).nats == pytest.approx(whole.nats, rel=1e-5)
    one_by_one = score(model, ids, 9, 1)
    assert one_by_one.nats == pytest.approx(nats(folder, 9), rel=1e-5) != pytest.approx(whole.nats, rel=1e-5)
    assert score(model, ids, 30, 7).num_targets == one_by_one.num_targets == len(ids) - 1
    with pytest.raises(ValueError, match="stride: got 10, expected 1 to sequence_length"):
        score(model, ids, 9, 10)


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for name, message in [
        ("nowhere", "--text: cannot read"),
        ("empty", "has 1 tokens, expected at least 2"),
        ("binary", "is not UTF-8 (byte 2)"),
    ]:
        code, _, error = run(capsys, "--checkpoint", str(folder), "--text", str(tmp_path / name))
        assert code == 2 and message in error and error.count("\n") == 1
