"""Killed at any moment, the same command ends with the very weights of the run that was never killed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers.training import reproducible, run_tree

from fast_llm_ssm import checkpoint


def drill(folder: Path, moments: list[str], **sections) -> list[str]:
    """Run one undisturbed and one killed at these moments; returns how each killed process ended."""
    files = []
    for name in ("undisturbed", "killed"):
        (folder / name).mkdir()
        tree = run_tree(folder / name)
        tree["train"]["steps"] = 12
        tree["validation"] = {"every": 5}
        for key, section in sections.items():
            tree[key] |= section
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(tree))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-m", "helpers.drill", *map(str, files), *moments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.split()[1] in ("killed", "ended")]


def compare(folder: Path) -> None:
    killed, undisturbed = (folder / name / "runs" / "tiny" for name in ("killed", "undisturbed"))
    one, two = checkpoint.find(killed), checkpoint.find(undisturbed)
    assert one.step == two.step == 12 and one.state["samples"] == two.state["samples"]
    for ours, theirs in ((one.read_tensors(), two.read_tensors()), (one.read_optimizer(), two.read_optimizer())):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert reproducible(killed) == reproducible(undisturbed)
    assert not list((killed / "checkpoints").glob("*.tmp-*"))


def test_five_kills(tmp_path):
    draw = random.Random(7)
    moments = [f"{draw.uniform(0, 0.5):.3f}" for _ in range(3)]
    ends = drill(tmp_path, [moments[0], "save", *moments[1:], "save"])
    assert len(ends) == 5 and all(end.split()[1] == "killed" for end in ends), ends
    assert all(len(end.split()) == 3 for end in ends if end.startswith("save")), ends  # half a checkpoint was there
    compare(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_kills(tmp_path, seed):
    draw = random.Random(seed)
    moments = [draw.choice(["save", f"{draw.uniform(0, 1):.3f}"]) for _ in range(30)]
    drill(tmp_path, moments, log={"tensorboard": True}, checkpoint={"every": 1, "keep": 3})
    compare(tmp_path)
