"""`fast-llm train` as a process: exit codes, signals, one line where something is wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.training import metrics, run_file

from fast_llm_ssm import cli
from fast_llm_ssm.train.guards import TrainingStopped
from fast_llm_ssm.train.trainer import Trainer


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


def test_train_to_the_end(tmp_path, capsys):
    code, out, err = run("train", "--config", str(run_file(tmp_path)), "train.steps=2", capsys=capsys)
    assert (code, err) == (0, "")
    assert "step    2/2  loss" in out


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.lrr=1", "did you mean `lr`"),
        ("data=null", "the run file has no `data:` section, training needs both"),
        ("model.vocab_size=100", "model.vocab_size: got 100"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, override, line):
    code, _, err = run("train", "--config", str(run_file(tmp_path)), override, capsys=capsys)
    assert code == 2 and line in err and "Traceback" not in err
    assert len([text for text in err.splitlines() if "nothing was started" not in text]) == 1


def test_a_stopped_run_is_one_line_and_exit_code_1(tmp_path, capsys, monkeypatch):
    def train_step(trainer, loader):
        raise TrainingStopped("step 3: the gradient of x holds NaN")

    monkeypatch.setattr(Trainer, "train_step", train_step)
    code, _, err = run("train", "--config", str(run_file(tmp_path)), capsys=capsys)
    assert (code, err) == (1, "step 3: the gradient of x holds NaN\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_step_and_saves(tmp_path, number):
    path = run_file(tmp_path)
    command = [sys.executable, "-m", "fast_llm_ssm", "train", "--config", str(path), "train.steps=100000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "tiny"
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    step = metrics(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"step-{step}" / "complete.json").exists()
    assert f"stopped {number.name} after step {step:,}, saved; the same command goes on" in out


@pytest.mark.slow
def test_the_default_run_learns_python(tmp_path):
    path = Path(__file__).parents[2] / "configs" / "hybrid.yaml"
    command = [sys.executable, "-m", "fast_llm_ssm", "train", "--config", str(path), f"runs={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)
    begin = time.monotonic()
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert time.monotonic() - begin < 240
    losses = re.search(r"validation loss ([\d.]+), a bigram model's ([\d.]+)", out)
    assert losses is not None and float(losses[1]) < float(losses[2]) - 0.3
    samples = out.split("sample after step")[1:]
    assert len(samples) == 5
    indented = re.compile(r"^( *)(def|if|for)\b.*:\n\1 +\S", re.MULTILINE)
    assert any(indented.search(sample) for sample in samples)


def wait_until(ready) -> None:
    begin = time.monotonic()
    while not ready():
        assert time.monotonic() - begin < 240
        time.sleep(0.01)
