"""Every command in the README, CONTRIBUTING and the examples is true: it is run here, or by CI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))


def commands(document: Path) -> list[str]:
    """The lines of a document's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone holds, apart from the code, and an environment in .venv that shares this one's packages."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "examples", "README.md", "CONTRIBUTING.md"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    (site,) = (folder / ".venv").glob("lib/python*/site-packages")
    (site / "shared.pth").write_text("\n".join([str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))]))
    script = folder / ".venv/bin/fast-llm"
    script.write_text(f"#!{folder}/.venv/bin/python\nfrom fast_llm_ssm.cli import main\nmain()\n")
    script.chmod(0o755)
    return folder


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_its_readme_says(example: str, checkout: Path):
    lines = commands(checkout / "examples" / example / "README.md")
    assert lines, "the README shows no command"
    # One shell for all lines, as a reader has.
    run("\n".join(lines), checkout)


def test_every_example_has_a_readme():
    assert EXAMPLES == sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir())


def test_the_readmes_setup_commands_name_what_exists():
    for document in ("README.md", "CONTRIBUTING.md"):
        for line in commands(ROOT / document):
            for path in re.findall(r"(?:configs|examples|tests|\.ci)/[\w./-]*", line):
                assert (ROOT / path).exists(), f"{document}: {line}"


def test_the_readmes_other_commands_run(checkout: Path):
    """All but the two that set up from nothing: CI runs the one for tests, the default run has its own test."""
    for line in commands(checkout / "README.md"):
        if "pip install" not in line:
            run(f". .venv/bin/activate\n{line}", checkout)
