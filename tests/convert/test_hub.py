"""Import by hub id, with a stub in place of the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.mamba_layouts import mamba, save_mamba_ssm

from fast_llm_ssm.cli import main
from fast_llm_ssm.convert import hub
from fast_llm_ssm.convert.load import load_model


class Hub:
    """Holds one repository, some-lab/tiny-mamba, and notes what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[object] = []

    def model_info(self, repository: str, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        self.asked.append((repository, revision))
        if repository != "some-lab/tiny-mamba":
            raise OSError(f"404 Client Error: no {repository}\nmore lines")
        files = [SimpleNamespace(rfilename=path.name, size=path.stat().st_size) for path in self.folder.iterdir()]
        return SimpleNamespace(sha="abc123", siblings=[*files, SimpleNamespace(rfilename="onnx/model.onnx", size=9)])

    def snapshot_download(self, repository: str, revision: str, allow_patterns: list[str]) -> str:
        self.asked.append((repository, revision, sorted(allow_patterns)))
        return str(self.folder)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    hub = Hub(save_mamba_ssm(mamba(vocab_size=64)(), tmp_path / "snapshots" / "abc123"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return hub


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_a_hub_id_is_downloaded_and_gives_the_name(stub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import", "some-lab/tiny-mamba", "checkpoint") == 0
    assert stub.asked == [
        ("some-lab/tiny-mamba", None),
        ("some-lab/tiny-mamba", "abc123", ["config.json", "pytorch_model.bin"]),
    ]
    assert capsys.readouterr().out.startswith("some-lab/tiny-mamba: 2 files, 0.00 GB, into the hub's cache\n")
    assert load_model("checkpoint").config.name == "tiny-mamba"


def test_a_revision_can_be_asked_for(stub: Hub) -> None:
    assert run("import", "some-lab/tiny-mamba@v1.0", "checkpoint", "model.name=mine") == 0
    assert stub.asked[0] == ("some-lab/tiny-mamba", "v1.0")
    assert load_model("checkpoint").config.name == "mine"


def test_what_the_hub_refuses_is_one_line(stub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import", "some-lab/absent", "checkpoint") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("some-lab/absent: no such folder, and not to be had from the Hugging Face hub "
                         "(404 Client Error: no some-lab/absent)")  # fmt: skip
    assert not Path("checkpoint").exists()


def test_a_full_target_is_said_before_anything_is_downloaded(stub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    Path("checkpoint").mkdir()
    Path("checkpoint", "x").touch()
    assert run("import", "some-lab/tiny-mamba", "checkpoint") == 2
    assert "exists and is not empty" in capsys.readouterr().err and not stub.asked


def test_paths_are_no_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/typo", "./typo", "../typo", str(tmp_path / "typo"), "typo", "a/b/c", ""):
        assert not hub.is_hub_id(path), path
    assert hub.is_hub_id("state-spaces/mamba-130m") and hub.is_hub_id("a/b@refs/pr/1")


def test_one_format_of_weights_is_downloaded() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    small = ["config.json", "tokenizer.json", "README.md"]
    others = ["consolidated.safetensors", "pytorch_model.bin", "model.onnx", "original/model.safetensors"]
    assert hub.wanted([*small, *shards, *others]) == [*small, *shards]
    assert hub.wanted([*small, "model.safetensors", *others]) == [*small, "model.safetensors"]
    assert hub.wanted([*small, "pytorch_model.bin", "tf_model.h5"]) == [*small, "pytorch_model.bin"]
    assert hub.wanted(["params.json", "consolidated.safetensors"]) == ["params.json", "consolidated.safetensors"]
