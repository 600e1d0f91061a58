"""`fast-llm check` on broken run files: one line for each mistake, all at once, exit code 2, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fast_llm_ssm
from fast_llm_ssm.cli import main
from fast_llm_ssm.data import data_sources, tokenizers
from fast_llm_ssm.layers import mixers
from fast_llm_ssm.train.schedule import schedules

REGISTRIES = {"MIXERS": mixers, "SCHEDULES": schedules, "SOURCES": data_sources, "TOKENIZERS": tokenizers}

GOOD = """\
name: good
model:
  hidden_size: 64
  vocab_size: 258
  shared:
    T:
    - {input_size: 128, residual: false, mixer: {type: attention, num_heads: 4, head_dim: 32, rope: {}}}
    - {residual: false, mixer: {type: mlp, size: 128}}
  blocks:
    m:
      mixer: {type: mamba2, d_inner: 128, d_state: 16, head_dim: 32, chunk_size: 64}
    a:
    - mixer: {type: attention, num_heads: 4, num_kv_heads: 2, head_dim: 16, window: 32}
    - mixer: {type: mlp, size: 128}
    h:
      mixer: {type: mamba2, d_inner: 128, d_state: 16, head_dim: 32, n_groups: 2}
      inject: {shared: [T], adapters: {rank: 4, targets: [q, gate_up]}}
  pattern: (mma)2 h
data:
  tokenizer: {type: bytes}
  sequence_length: 128
  sources:
  - {type: python_stdlib}
train: {steps: 10, batch_size: 8, micro_batch_size: 4}
optim: {lr: 3e-4}
schedule: {type: cosine, warmup_steps: 2}
checkpoint: {every: 5}
"""

# What to replace in the good file, by what, and the line that must come.
BROKEN = {
    "typo at the top": ("optim:", "optm:", "25: optm: unknown key, did you mean `optim`?"),
    "typo in a section": (
        "lr: 3e-4",
        "learnig_rate: 3e-4",
        "25: optim.learnig_rate: unknown key; known: lr, betas, eps, weight_decay, clip",
    ),
    "typo in a mixer": (
        "d_state: 16, head_dim: 32, chunk",
        "d_sate: 16, head_dim: 32, chunk",
        "11: model.blocks.m.mixer.d_sate: unknown key, did you mean `d_state`?",
    ),
    "typo in a sublayer": ("inject: {", "injct: {", "17: model.blocks.h.injct: unknown key, did you mean `inject`?"),
    "typo in a nested section": (
        "rank: 4",
        "rnk: 4",
        "17: model.blocks.h.inject.adapters.rnk: unknown key, did you mean `rank`?",
    ),
    "typo in a mixer's name": (
        "type: attention, num_heads: 4, num_kv",
        "type: atention, num_heads: 4, num_kv",
        "13: model.blocks.a.0.mixer.type: unknown mixer `atention`, did you mean `attention`? known: MIXERS",
    ),
    "typo in a schedule's name": (
        "type: cosine",
        "type: cosin",
        "26: schedule.type: unknown schedule `cosin`, did you mean `cosine`? known: SCHEDULES",
    ),
    "typo in a source's name": (
        "type: python_stdlib",
        "type: python_sdtlib",
        "23: data.sources.0.type: unknown data source `python_sdtlib`, did you mean `python_stdlib`? known: SOURCES",
    ),
    "typo in a tokenizer's name": (
        "type: bytes",
        "type: byte",
        "20: data.tokenizer.type: unknown tokenizer `byte`, did you mean `bytes`? known: TOKENIZERS",
    ),
    "key of another section": (
        "steps: 10,",
        "steps: 10, lr: 3e-4,",
        "24: train.lr: unknown key, did you mean `optim.lr`?",
    ),
    "key of a mixer beside it": (
        "inject: {",
        "head_dim: 32\n      inject: {",
        "17: model.blocks.h.head_dim: unknown key, did you mean `model.blocks.h.mixer.head_dim`?",
    ),
    "number as text": ("lr: 3e-4", 'lr: "3e-4"', '25: optim.lr: got "3e-4", expected a number greater than 0'),
    "boolean for a number": (
        "steps: 10",
        "steps: true",
        "24: train.steps: got true, expected an integer greater than 0",
    ),
    "float for an integer": (
        "steps: 10",
        "steps: 1e3",
        "24: train.steps: got 1000.0, expected an integer greater than 0",
    ),
    "null for a number": ("lr: 3e-4", "lr:", "25: optim.lr: got null, expected a number greater than 0"),
    "word of no meaning": (
        "steps: 10",
        "steps: 10, precision: bf8",
        '24: train.precision: got "bf8", expected one of auto, fp32, bf16',
    ),
    "word for a boolean": (
        "residual: false, mixer: {type: mlp",
        "residual: off, mixer: {type: mlp",
        '8: model.shared.T.1.residual: got "off", expected true or false',
    ),
    "negative learning rate": ("lr: 3e-4", "lr: -3e-4", "25: optim.lr: got -0.0003, expected a number greater than 0"),
    "zero window": (
        "window: 32",
        "window: 0",
        "13: model.blocks.a.0.mixer.window: got 0, expected an integer greater than 0 or null",
    ),
    "heads that do not divide": (
        "num_kv_heads: 2",
        "num_kv_heads: 3",
        "13: model.blocks.a.0.mixer.num_kv_heads: got 3, expected a divisor of num_heads (4)",
    ),
    "inner size that heads do not divide": (
        "d_inner: 128, d_state: 16, head_dim: 32, chunk",
        "d_inner: 130, d_state: 16, head_dim: 32, chunk",
        "11: model.blocks.m.mixer.head_dim: got 32, expected a divisor of d_inner (130)",
    ),
    "groups that do not divide": (
        "n_groups: 2",
        "n_groups: 3",
        "16: model.blocks.h.mixer.n_groups: got 3, expected a divisor of the 4 heads",
    ),
    "micro-batch that does not divide": (
        "micro_batch_size: 4",
        "micro_batch_size: 3",
        "24: train.micro_batch_size: got 3, expected a divisor of batch_size (8)",
    ),
    "pattern with an unknown block": (
        "(mma)2 h",
        "(mma)2 hx",
        "18: model.pattern: names the unknown block `x`, expected one of: m, a, h",
    ),
    "pattern with a bracket open": (
        "(mma)2 h",
        "(mma2 h",
        "18: model.pattern: got '(mma2 h', expected brackets that pair, followed by a number, as in (mmh)2",
    ),
    "pattern that never ends": (
        "(mma)2 h",
        "((((m)9999)9999)9999)9999",
        "18: model.pattern: got '((((m)9999)9999)9999)9999', expected at most 10,000 layers",
    ),
    "unknown shared block": (
        "shared: [T]",
        "shared: [U]",
        "17: model.blocks.h.inject.shared: names the unknown shared block `U`, expected one of: T",
    ),
    "unknown adapter target": (
        "targets: [q, gate_up]",
        "targets: [q, up]",
        "17: model.blocks.h.inject.adapters.targets: got `up`, expected what shared.T can adapt: gate_up, k, q, v",
    ),
    "shared block of another width": (
        "input_size: 128, ",
        "",
        "7: model.shared.T.0.input_size: got 64, expected 128 for blocks.h.0.inject.input concat_embedding",
    ),
    "list for a mapping": ("optim: {lr: 3e-4}", "optim: [lr]", '25: optim: got ["lr"], expected a mapping'),
    "mapping for a list": (
        "sources:\n  - {type: python_stdlib}",
        "sources: {type: python_stdlib}",
        "22: data.sources: got a mapping, expected a list of mappings",
    ),
    "mixer without a type": (
        "{type: mlp, size: 128}\n    h",
        "{size: 128}\n    h",
        "14: model.blocks.a.1.mixer.type: missing key, expected one of MIXERS",
    ),
    "mixer as a word": (
        "{type: mlp, size: 128}\n    h",
        "mlp\n    h",
        '14: model.blocks.a.1.mixer: got "mlp", expected a mapping',
    ),
    "empty block": (
        "h:\n      mixer",
        "e: []\n    h:\n      mixer",
        "15: model.blocks.e: got [], expected a list of mappings with at least 1 item",
    ),
    "missing key": ("  vocab_size: 258\n", "", "2: model.vocab_size: missing key, expected an integer greater than 0"),
    "missing section": (
        GOOD[GOOD.index("model:") : GOOD.index("data:")],
        "",
        "1: model: missing key, expected a mapping",
    ),
    "duplicate key": ("lr: 3e-4", "lr: 3e-4, lr: 1e-4", "25: optim.lr: duplicate key, first written in line 25"),
    "tokenizer folder that is missing": (
        "{type: bytes}",
        "{type: huggingface, path: gone}",
        "20: data.tokenizer.path: no such folder: gone, expected one with tokenizer.json or tokenizer.model",
    ),
    "text file that is missing": (
        "{type: python_stdlib}",
        "{type: text, paths: [gone.txt]}",
        "23: data.sources.0.paths.0: no such file: gone.txt",
    ),
    "prepared folder that is missing": (
        "{type: python_stdlib}",
        "{type: tokens, path: gone}",
        "23: data.sources.0.path: no such folder: gone, expected one that `fast-llm prepare` wrote",
    ),
    "checkpoint that is missing": (
        "  hidden_size: 64",
        "  from: gone\n  hidden_size: 64",
        "3: model.from: gone: no such folder, expected a checkpoint or a run",
    ),
    "plugin that is missing": (
        "name: good",
        "plugins: [gone_plugin]",
        "1: plugins.0: importing `gone_plugin` failed: ModuleNotFoundError: No module named 'gone_plugin'",
    ),
    "warm-up longer than the run": (
        "warmup_steps: 2",
        "warmup_steps: 20",
        "26: schedule.warmup_steps: got 20, expected at most train.steps (10)",
    ),
    "wrong expectation": (
        "  pattern",
        "  expect: {layers: 8}\n  pattern",
        "18: model.expect.layers: got 8, but the pattern gives 7",
    ),
    "wrong number of parameters": (
        "  pattern",
        "  expect: {params: 8}\n  pattern",
        " model.expect.params: the config gives 320,700 parameters, expected 8",
    ),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def line_of(name: str) -> str:
    """What must come for a mistake; a registry's name there stands for all its names."""
    line = BROKEN[name][2]
    for word, registry in REGISTRIES.items():
        line = line.replace(word, ", ".join(registry.names()))
    return f"run.yaml:{line}"


def check(capsys: pytest.CaptureFixture[str], text: str | bytes | None, *overrides: str) -> list[str]:
    """The lines that `check` prints about a broken run file, without the closing one."""
    if text is not None:
        Path("run.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SystemExit) as caught:
        main(["check", "--config", "run.yaml", *overrides])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert not re.search("Traceback|pydantic|https?:", err)
    *lines, last = err.splitlines()
    if not re.match(r"\d+ errors?; nothing was started.$", last):
        assert not lines, "a failure of the whole file is one line"
        return [last]
    assert int(last.split()[0]) == len(lines)
    return lines


def test_the_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    with pytest.raises(SystemExit) as caught:
        main(["check", "--config", "run.yaml", "train.steps=1000"])
    assert caught.value.code == 0
    sizes = "7 layers (4 m, 2 a, 1 h), 320,700 parameters; 1,000 steps of 8 x 128 tokens"
    assert capsys.readouterr().out == f"run.yaml: OK; {sizes}\n"


@pytest.mark.parametrize("name", BROKEN)
def test_one_mistake(capsys: pytest.CaptureFixture[str], name: str) -> None:
    old, new, _ = BROKEN[name]
    assert GOOD.count(old) == 1
    assert check(capsys, GOOD.replace(old, new)) == [line_of(name)]


def test_all_mistakes_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that keep their line, all in one file. Checks of a section as a whole wait until its keys are right."""
    names = [
        "typo in a mixer",
        "typo in a mixer's name",
        "typo in a source's name",
        "typo in a tokenizer's name",
        "typo in a schedule's name",
        "word for a boolean",
        "negative learning rate",
        "key of another section",
        "groups that do not divide",
    ]
    text = GOOD
    for name in names:
        old, new, _ = BROKEN[name]
        text = text.replace(old, new)
    lines = sorted(map(line_of, names), key=lambda line: int(line.split(":")[1]))
    overrides = ["train.batch_size=0", "checkpoint.kep=3"]
    assert check(capsys, text, *overrides) == [
        *lines,
        "override 'train.batch_size=0': train.batch_size: got 0, expected an integer greater than 0",
        "override 'checkpoint.kep=3': checkpoint.kep: unknown key, did you mean `keep`?",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "run.yaml: no such file"),
        ("", "run.yaml: the file is empty, expected a mapping"),
        ("# nothing\n", "run.yaml: the file is empty, expected a mapping"),
        ("- model\n", "run.yaml:1: expected a mapping of keys to values"),
        (b"name: \xff\xfe\n", "run.yaml:1: not a text file in UTF-8"),
        (GOOD + "log: {every: 1\n", "run.yaml:29: not valid YAML: "),
        (GOOD + "\tlog: {}\n", "run.yaml:28: not valid YAML: "),
        (GOOD + "log: &l {every: *l}\n", "run.yaml:28: not valid YAML: an alias contains itself"),
        (GOOD + "log: *l\n", "run.yaml:28: not valid YAML: found undefined alias 'l'"),
        ("extends: gone.yaml\n" + GOOD, "run.yaml:1: extends: gone.yaml: no such file"),
        ("extends: run.yaml\n" + GOOD, "run.yaml:1: extends: files extend each other: run.yaml -> run.yaml"),
    ],
)
def test_what_is_no_run_file_is_one_line(
    capsys: pytest.CaptureFixture[str], text: str | bytes | None, line: str
) -> None:
    (got,) = check(capsys, text)
    assert got.startswith(line)


@pytest.mark.parametrize(
    "override",
    [
        "model.hidden_size=1000000000000",
        "model.vocab_size=99999999999999999999999",
        "model.num_blocks=99999999999",
        "model.blocks.m.mixer.n_groups=4096",
        "model.blocks.m.mixer.d_state=99999999999999999999",
        "model.pattern=(m)99999999999999999999",
        "model.pattern=))((",
        "model.pattern=[]",
        "model.pad_vocab_multiple=99999999999999999999999",
        "data.sequence_length=0",
        "train.steps=-1",
        "seed=-1",
        "name=a/b",
        "schedule=cosine",
        "model.blocks.m=3",
        "model.blocks={}",
        "model.shared={}",
        "data.sources=[]",
        "optim.betas=[0.9, 1]",
        "checkpoint={every: 1, every: 2}",
    ],
)
def test_absurd_values(capsys: pytest.CaptureFixture[str], override: str) -> None:
    assert len(check(capsys, GOOD, override)) == 1


@pytest.mark.parametrize("command", ["train", "estimate"])
def test_other_commands_say_the_same(capsys: pytest.CaptureFixture[str], command: str) -> None:
    Path("run.yaml").write_text(GOOD.replace("lr: 3e-4", "lr: -1"))
    with pytest.raises(SystemExit) as caught:
        main([command, "--config", "run.yaml"])
    assert caught.value.code == 2
    line = "run.yaml:25: optim.lr: got -1, expected a number greater than 0"
    assert capsys.readouterr().err == f"{line}\n1 error; nothing was started.\n"


def test_as_a_process() -> None:
    Path("run.yaml").write_text(GOOD.replace("d_state: 16, head_dim: 32, chunk", "d_sate: 16, head_dim: 32, chunk"))
    command = [sys.executable, "-m", "fast_llm_ssm", "check", "--config", "run.yaml", "optim.lr=x"]
    path = {"PYTHONPATH": str(Path(fast_llm_ssm.__file__).parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "run.yaml:11: model.blocks.m.mixer.d_sate: unknown key, did you mean `d_state`?",
        "override 'optim.lr=x': optim.lr: got \"x\", expected a number greater than 0",
        "2 errors; nothing was started.",
    ]
