import json
import re

import pytest
from helpers.documents import make_tokenizer_folder, write_jsonl

from fast_llm_ssm.cli import main
from fast_llm_ssm.data.documents import read_prepared


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    write_jsonl(tmp_path / "a.jsonl", ["first", "second"])
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(["prepare", *arguments])
    output = capsys.readouterr()
    return exited.value.code or 0, output.out, output.err


def test_text_with_bytes(capsys, folder):
    code, out, _ = run(capsys, "out", "--text", "*.txt", "--split", "blank_lines", "--tokenizer", "bytes")
    assert (code, out) == (
        0,
        "out: 2 documents, 11 tokens (uint16)\ndata.sources: [{type: tokens, path: out}]\n",
    )
    assert bytes(read_prepared(folder / "out")[1][1:-1].astype("u1")) == b"two"
    assert run(capsys, "out", "--text", "*.txt", "--split", "blank_lines", "--tokenizer", "bytes")[:2] == (code, out)


def test_jsonl_with_a_tokenizer_folder(capsys, folder):
    make_tokenizer_folder(folder / "tokenizer")
    code, out, _ = run(capsys, "out", "--jsonl", "a.jsonl", "--tokenizer", "tokenizer")
    assert code == 0 and out.startswith("out: 2 documents")
    assert json.loads((folder / "out" / "meta.json").read_text())["tokenizer"].startswith("huggingface-")
    assert (folder / "out" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "b.txt", "--tokenizer", "bytes"], r"source\.paths\.0: no such file: b\.txt"),
        (["--text", "a.txt", "--tokenizer", "nowhere"], r"tokenizer\.path: no such folder: nowhere"),
        (
            ["--text", "a.txt", "--split", "lines", "--tokenizer", "bytes"],
            "expected one of file, blank_lines, delimiter",
        ),
        (["--text", "a.txt"], "expected --text or --jsonl, and --tokenizer"),
        (["--text", "a.txt", "--jsonl", "a.jsonl", "--tokenizer", "bytes"], "expected --text or --jsonl"),
        (["--jsonl", "a.txt", "--tokenizer", "bytes"], r"a\.txt:1: is not JSON"),
        (["seed=3", "--text", "a.txt", "--tokenizer", "bytes"], "got seed=3 without --config"),
        (["--config", "run.yaml", "--text", "a.txt"], "expected one or the other"),
    ],
)
def test_mistakes_are_one_line_and_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "out", *arguments)
    lines = [line for line in err.splitlines() if "nothing was started" not in line]
    assert code == 2 and not out and len(lines) == 1 and re.search(message, lines[0])


RUN = """
model: {hidden_size: 8, vocab_size: 258, blocks: {m: [{mixer: {type: mlp, size: 8}}]}, pattern: m}
data:
  sources:
    - {type: text, paths: [a.txt], weight: 2}
    - {type: jsonl, paths: [a.jsonl]}
  tokenizer: {type: bytes}
  sequence_length: 4
"""


def test_a_source_of_a_run_file(capsys, folder):
    (folder / "run.yaml").write_text(RUN)
    code, out, _ = run(capsys, "out", "--config", "run.yaml", "--source", "1", "data.sources.1.field=text")
    assert code == 0 and out.startswith("out: 2 documents, 15 tokens")
    for arguments, message in (
        ([], "several data.sources, expected --source with one of 0 (text), 1 (jsonl)"),
        (["--source", "2"], "--source: got 2, expected one of the 2 data.sources"),
        (["--source", "0", "data.sources.0.paths.0=b.txt"], "no such file: b.txt"),
        (["data=null"], "no `data`, expected one to prepare with"),
    ):
        code, _, err = run(capsys, "elsewhere", "--config", "run.yaml", *arguments)
        assert code == 2 and message in err
