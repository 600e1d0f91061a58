"""fast-llm import and export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import huggingface as hf

from fast_llm_ssm.cli import main
from fast_llm_ssm.convert.load import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.zamba2(num_mem_blocks=2, layers="mhmhh"), tmp_path_factory.mktemp("cli") / "tiny-zamba")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


def test_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import", folder, tmp_path / "checkpoint") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: format zamba2, 5 layers, 84,904 parameters"
    assert any("dt_limit" in line for line in lines) and lines[-1] == f"wrote {tmp_path / 'checkpoint'}"
    assert run("export", tmp_path / "checkpoint", tmp_path / "out") == 0
    count = len(hf.read_tensors(folder))
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / 'out'}: {count} tensors in 1 files"
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_overrides_and_dtype(folder: Path, tmp_path: Path) -> None:
    assert run("import", folder, tmp_path / "checkpoint", "mamba2.dt_limit=[0.0,.inf]", "model.name=mine") == 0
    model = load_model(tmp_path / "checkpoint")
    assert model.config.name == "mine" and model.layers[1][0].mixer.config.dt_limit == (0.0, float("inf"))
    assert run("export", tmp_path / "checkpoint", tmp_path / "out", "--dtype", "bfloat16") == 0
    assert {tensor.dtype for tensor in hf.read_tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert hf.read_config(tmp_path / "out")["dtype"] == "bfloat16"  # what transformers loads it in


def test_faults_are_one_line_each(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    broken = hf.write_folder(
        tmp_path / "broken", {**hf.read_config(folder), "a": 1, "b": 2}, {"model.layers.0.x": torch.ones(1)}
    )
    for arguments, lines in (
        (("import", folder, tmp_path / "full"), ["exists and is not empty"]),
        (("import", tmp_path / "absent", tmp_path / "new"), ["no such folder"]),
        (("import", broken, tmp_path / "new"), ["does not know a: 1", "does not know b: 2"]),
        (("export", folder, tmp_path / "new"), ["neither a checkpoint nor a run folder"]),
        (("import", folder, tmp_path / "new", "mamba.d_state=3"), ["override 'mamba.d_state=3'"]),
    ):
        assert run(*arguments) == 2
        said = capsys.readouterr().err.splitlines()
        assert all(wanted in line for wanted, line in zip(lines, said, strict=False)) and len(said) >= len(lines), said
        assert "Traceback" not in "\n".join(said) and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_import_and_export_work_without_kernels(folder: Path, tmp_path: Path) -> None:
    """A triton that breaks at import is nobody's business here."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise OSError('broken')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for arguments in (
        ("import", folder, tmp_path / "checkpoint"),
        ("export", tmp_path / "checkpoint", tmp_path / "out"),
    ):
        subprocess.run([sys.executable, "-m", "fast_llm_ssm", *map(str, arguments)], env=environment, check=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
