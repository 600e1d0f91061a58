"""Stopping and going on: nothing differs from a run that never stopped."""

import shutil

import pytest
import torch
from helpers.training import metrics, reproducible, tiny_run, write_text

from fast_llm_ssm import checkpoint
from fast_llm_ssm.config import UserError
from fast_llm_ssm.train.config import load_config
from fast_llm_ssm.train.run_folder import RunFolder, differences
from fast_llm_ssm.train.signals import StopSignal
from fast_llm_ssm.train.trainer import Trainer, train


class StopAfter:
    """Like StopSignal, but the signal arrives during step N."""

    def __init__(self, monkeypatch, step):
        self.received = None
        original = Trainer.train_step

        def train_step(trainer, loader):
            if trainer.step + 1 == step:
                self.received = "SIGTERM"
            return original(trainer, loader)

        monkeypatch.setattr(Trainer, "train_step", train_step)


def train_until(monkeypatch, step, config) -> bool:
    with monkeypatch.context() as patch:
        return train(config, StopAfter(patch, step))


def equal_checkpoints(one, two) -> None:
    first, second = checkpoint.find(one), checkpoint.find(two)
    assert first.state == second.state
    for read in (checkpoint.Checkpoint.read_tensors, checkpoint.Checkpoint.read_optimizer):
        theirs = read(second)
        for name, tensor in read(first).items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of nine steps, over the end of an epoch of the data, that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder / "text.txt", documents=12)
    config = tiny_run(folder, *LONGER)
    assert train(config)
    epochs = RunFolder(config)  # the rows of a pass over the data are fewer than those consumed
    assert epochs.newest().state["samples"] == 36
    return folder


LONGER = ("train.steps=9", "validation.every=4", "checkpoint.every=null")


@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_stopped_and_gone_on_is_bit_identical(tmp_path, monkeypatch, undisturbed, capsys, step):
    shutil.copy(undisturbed / "text.txt", tmp_path)
    config = tiny_run(tmp_path, *LONGER, f"data.sources.0.paths=[{undisturbed}/text.txt]")
    run = tmp_path / "runs" / "tiny"
    assert not train_until(monkeypatch, step, config)
    assert f"stopped SIGTERM after step {step}, saved; the same command goes on" in capsys.readouterr().out
    assert checkpoint.find(run).step == step
    assert train(config)
    shown = capsys.readouterr().out
    assert f"resume  {run}/checkpoints/step-{step} (complete; data at sample {4 * step})" in shown
    equal_checkpoints(run, undisturbed / "runs" / "tiny")
    # Loss, validation loss, learning rate, gradient norm and position in the data, each step once.
    assert reproducible(run) == reproducible(undisturbed / "runs" / "tiny")


def test_a_broken_newest_checkpoint_is_passed_over(tmp_path, capsys):
    config = tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    train(config)
    before = reproducible(run)
    shutil.copytree(run / "checkpoints" / "step-6", tmp_path / "right")
    path = run / "checkpoints" / "step-6" / "weights" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert train(config)
    shown = capsys.readouterr().out
    assert (
        "warning " in shown and "step-6 is not a complete checkpoint and is ignored: weights/__0_0.distcp has" in shown
    )
    assert "resume  " in shown and "step-3 (complete" in shown
    equal_checkpoints(run, tmp_path / "right")
    assert reproducible(run) == before


def test_another_model_is_refused(tmp_path):
    train(tiny_run(tmp_path, "train.steps=2"))
    with pytest.raises(UserError) as error:
        train(tiny_run(tmp_path, "model.blocks.h.mixer.d_state=4", "model.residual_fp32=true"))
    message = str(error.value)
    assert "\n" not in message
    assert "model.blocks.h.0.mixer.d_state: 8 -> 4" in message and "model.residual_fp32: false -> true" in message
    assert "another name" in message


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("data.sequence_length=16", "data.sequence_length"),
        ("data.sources.0.weight=2.0", "data.sources.0.weight"),
        ("data.validation.fraction=0.3", "data.validation.fraction"),
    ],
)
def test_other_data_is_refused(tmp_path, override, key):
    train(tiny_run(tmp_path, "train.steps=2"))
    with pytest.raises(UserError, match=f"changed: .*{key}.*another name"):
        train(tiny_run(tmp_path, override))


def test_a_changed_text_is_refused(tmp_path):
    config = tiny_run(tmp_path, "train.steps=2")
    train(config)
    write_text(tmp_path / "text.txt", seed=1)
    with pytest.raises(UserError, match="changed: data.sources.0"):
        train(tiny_run(tmp_path))


def test_other_settings_may_change_and_are_told(tmp_path, capsys):
    train(tiny_run(tmp_path, "train.steps=2"))
    capsys.readouterr()
    assert train(tiny_run(tmp_path, "train.batch_size=8", "optim.lr=1e-3"))
    shown = capsys.readouterr().out
    assert "changed train.steps: 2 -> 6" in shown
    assert "changed optim.lr: 0.01 -> 0.001" in shown
    rows = metrics(tmp_path / "runs" / "tiny")
    assert [row["tokens"] // 24 for row in rows] == [4, 8, 16, 24, 32, 40]  # the data goes on where it was


def test_weights_alone_start_a_fresh_schedule(tmp_path, capsys):
    config = tiny_run(tmp_path)
    train(config)
    capsys.readouterr()
    path = tmp_path / "second.yaml"
    path.write_text(f"extends: tiny.yaml\nname: second\nmodel: {{from: {tmp_path}/runs/tiny}}\n")
    assert train(load_config(path))
    shown = capsys.readouterr().out
    origin = f"{tmp_path}/runs/tiny/checkpoints/step-6 (trained for 6 steps)"
    assert f"start   at step 0 of a fresh schedule, weights of {origin}" in shown
    first, second = (metrics(tmp_path / "runs" / name) for name in ("tiny", "second"))
    assert [row["lr"] for row in second] == [row["lr"] for row in first]
    assert [row["tokens"] for row in second] == [row["tokens"] for row in first]
    assert second[0]["loss"] < first[0]["loss"] - 0.3
    saved = checkpoint.find(tmp_path / "runs" / "second")
    assert "from" not in saved.config["model"]  # it stands on its own
    assert "from: " in (tmp_path / "runs" / "second" / "config.yaml").read_text()
    assert train(load_config(path))  # and the same command finds its own checkpoint, not the weights again
    assert "was reached before" in capsys.readouterr().out


def test_one_process_a_folder(tmp_path):
    config = tiny_run(tmp_path)
    with RunFolder(config):
        with pytest.raises(UserError, match="runs/tiny: another process is training in this folder"):
            train(config)
    assert train(config)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match="runs/tiny: cannot be written: Not a directory"):
        train(tiny_run(tmp_path))


def test_leftovers_of_a_dead_save_go(tmp_path):
    import os

    left = tmp_path / "runs" / "tiny" / "checkpoints" / f"step-2.tmp-{os.uname().nodename}-{os.getpid()}"
    left.mkdir(parents=True)
    train(tiny_run(tmp_path, "train.steps=2"))
    assert not left.exists()


def test_differences():
    before = {"a": 1, "b": [1, {"c": None}], "d": {"x": 1}, "e": [1, 2]}
    now = {"a": 1, "b": [1, {"c": "word"}], "d": 3, "e": [1], "f": 1.5}
    assert differences(before, now) == [
        "b.1.c: none -> word",
        "d: {x: 1} -> 3",
        "e: [1, 2] -> [1]",
        "f: none -> 1.5",
    ]


def test_a_second_signal_acts_at_once():
    import os
    import signal

    before = signal.getsignal(signal.SIGINT)
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.received == "SIGINT"
    assert signal.getsignal(signal.SIGINT) == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
