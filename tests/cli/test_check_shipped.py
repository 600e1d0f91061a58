"""Every YAML file of the repository is a run file that `fast-llm check` accepts; and the command line around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fast_llm_ssm
from fast_llm_ssm.cli import COMMANDS, main
from fast_llm_ssm.config import read_yaml
from fast_llm_ssm.layers import mixers

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path.relative_to(ROOT) for folder in ("configs", "examples") for path in ROOT.glob(f"{folder}/**/*.yaml")
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_shipped_run_files(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.chdir(ROOT)
    model = read_yaml((ROOT / path).read_text()).get("model", {})
    overrides = []
    if path.parts[:2] == ("examples", "own_mixer"):  # stands for the installed package of the example
        monkeypatch.syspath_prepend(str(ROOT / path.parent))
        monkeypatch.setattr(mixers, "_classes", dict(mixers._classes))
        overrides = ["plugins=[short_conv]"]
    code, out, err = run(capsys, "check", "--config", str(path), *overrides)
    if "from" in model:  # the checkpoint is made by the steps before
        assert err.splitlines()[1:] == ["1 error; nothing was started."]
        assert f"model.from: {model['from']}: no such folder" in err
    else:
        assert (code, err) == (0, "")
        assert out.startswith(f"{path}: OK; ")


def test_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_classes", dict(mixers._classes))

    @mixers.register("zzz_mine")
    class Mine(mixers["mlp"]):
        """Mine alone.

        And more.
        """

    code, out, err = run(capsys, "layers")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert {"attention", "mamba2", "mlp", "parallel"} <= lines.keys()
    assert lines["mamba2"].endswith("[fast_llm_ssm.layers.mamba2]")
    assert lines["zzz_mine"].split(maxsplit=1)[1] == f"Mine alone.  [{Mine.__module__}, out of tree]"


def process(
    *arguments: str, code: str = "from fast_llm_ssm.cli import main; main()"
) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(Path(fast_llm_ssm.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | path)


def test_help_is_quick_and_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    for command in COMMANDS:
        assert f"  {command.name} " in out and command.help in out, "too long for a line of 80"
    for command in COMMANDS:
        assert run(capsys, command.name, "--help")[0] == 0


def test_help_does_not_import_torch() -> None:
    code = f"""
import sys
from fast_llm_ssm.cli import main
for arguments in (["--help"], *([name, "--help"] for name in {[command.name for command in COMMANDS]})):
    try:
        main(arguments)
    except SystemExit as exit:
        assert exit.code == 0, arguments
    assert "torch" not in sys.modules, arguments
"""
    result = process(code=code)
    assert (result.returncode, result.stderr) == (0, "")


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "chek")
    assert (code, out) == (2, "") and "Did you mean 'check'?" in err
    code, out, err = run(capsys, "check")
    assert (code, out) == (2, "") and "--config" in err


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    code = "from fast_llm_ssm import cli; cli._import = lambda command: 1 / 0; cli.main(['layers'])"
    result = process(code=code)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    "importing", ["lambda command: stop()", "lambda command: stop"], ids=["while importing", "while running"]
)
def test_ctrl_c_is_quiet(importing: str) -> None:
    interrupt = "from fast_llm_ssm import cli\ndef stop(): raise KeyboardInterrupt\n"
    result = process(code=f"{interrupt}cli._import = {importing}\ncli.main(['layers'])")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_reader_that_leaves_is_no_fault() -> None:
    code = (
        "from fast_llm_ssm import cli\ndef talk(): print('a')\ncli._import = lambda command: talk\ncli.main(['layers'])"
    )
    path = {"PYTHONPATH": str(Path(fast_llm_ssm.__file__).parents[1])}
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | path,
    )
    os.close(write)
    assert result.stderr == ""
