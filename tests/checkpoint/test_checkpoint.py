"""Checkpoint folders: what is written is read back, and what is not whole is refused or passed over."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.config import UserError


class Tokenizer:
    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"type": "bytes"}')


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(5, 3, generator=generator),
        "layers.0.scale": torch.randn(7, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "view": torch.arange(100.0)[10:14],
    }


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("fast_llm_ssm")]


def write(folder: Path, **more) -> Path:
    options = dict(tensors=tensors(), config_yaml="model: {hidden_size: 8}\n", state={"step": 3}, tokenizer=Tokenizer())
    return checkpoint.save(folder, **(options | more))


def test_round_trip(tmp_path):
    folder = write(tmp_path / "deep" / "step-3", optimizer={"m": torch.ones(2)}, source_files={"config.json": "{}"})
    assert [path.name for path in folder.parent.iterdir()] == ["step-3"]
    found = checkpoint.find(folder)
    assert found.config == {"model": {"hidden_size": 8}} and found.step == 3
    assert found.folder("tokenizer").joinpath("tokenizer.json").read_text() == '{"type": "bytes"}'
    assert found.folder("source").joinpath("config.json").read_text() == "{}"
    assert found.read_optimizer()["m"].tolist() == [1, 1]
    read = found.read_tensors()
    assert sorted(read) == found.tensor_names == sorted(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype == found.dtypes[name]
        assert found.shapes[name] == tensor.shape
    assert (folder / "weights" / "__0_0.distcp").stat().st_size < 10_000  # the view did not bring its storage along
    assert list(found.read_tensors(["step"])) == ["step"]
    with pytest.raises(UserError, match="lack unknown"):
        found.read_tensors(["unknown"])


def test_what_is_optional_may_be_absent(tmp_path):
    found = checkpoint.find(write(tmp_path / "a", state=None, tokenizer=None))
    assert found.state == {} and found.step is None
    assert found.folder("optimizer") is None and found.folder("tokenizer") is None


def test_load_into_casts_and_refuses_other_models(tmp_path):
    source = nn.Linear(3, 2)
    found = checkpoint.find(checkpoint.save(tmp_path / "a", tensors=source.state_dict(), config_yaml="{}"))
    target = nn.Linear(3, 2, dtype=torch.float64)
    found.load_into(target)
    assert torch.equal(target.weight, source.weight.double())
    with pytest.raises(UserError, match="lack 1.bias, 1.weight"):
        found.load_into(nn.ModuleDict({"1": nn.Linear(3, 2)}))
    with pytest.raises(UserError, match="hold bias, which the model does not have"):
        found.load_into(nn.Linear(3, 2, bias=False))
    with pytest.raises(UserError, match=r"weight has shape \(2, 3\), the model's \(4, 3\)"):
        found.load_into(nn.Linear(3, 4))


def test_refuses_to_overwrite_unless_told(tmp_path):
    folder = write(tmp_path / "a")
    with pytest.raises(UserError, match="exists and is not empty"):
        write(folder)
    write(folder, overwrite=True, state={"step": 4})
    assert checkpoint.find(folder).step == 4
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failure_while_saving_leaves_nothing(tmp_path):
    def fail() -> torch.Tensor:
        raise OSError("disk is full")

    write(tmp_path / "a")
    with pytest.raises(Exception, match="disk is full"):
        write(tmp_path / "a", tensors={"x": LazyTensor((2,), torch.float32, fail)}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert checkpoint.find(tmp_path / "a").step == 3


def test_lazy_tensors_must_be_what_they_announced(tmp_path):
    with pytest.raises(Exception, match=r"x: expected \(2,\) torch.float32, got \(3,\) torch.float32"):
        write(tmp_path / "a", tensors={"x": LazyTensor((2,), torch.float32, lambda: torch.zeros(3))})


def test_saving_and_reading_hold_one_tensor_at_a_time(tmp_path):
    script = f"""
        import torch
        from pathlib import Path
        from fast_llm_ssm import checkpoint

        peak = 0

        def anonymous():
            line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
            return int(line.split()[1]) // 1024  # MiB

        def load():
            global peak
            peak = max(peak, anonymous())
            return torch.ones(4 << 20)  # 16 MiB

        start = anonymous()
        lazy = {{f"t{{i}}": checkpoint.LazyTensor((4 << 20,), torch.float32, load) for i in range(16)}}
        path = checkpoint.save(Path({str(tmp_path)!r}) / "a", tensors=lazy, config_yaml="{{}}")
        saving = max(peak, anonymous()) - start
        found = checkpoint.find(path)
        for name in found.tensor_names:
            assert found.read_tensors([name])[name][-1] == 1
            peak = max(peak, anonymous())
        print(saving, peak - start)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    saving, reading = map(int, run.stdout.split())
    assert saving < 80 and reading < 110, run.stdout  # all of them are 256


def test_newest_complete_one_of_a_run(tmp_path, caplog):
    run = tmp_path / "run"
    for step in (5, 10, 100):
        write(run / "checkpoints" / f"step-{step}", state={"step": step})
    assert checkpoint.find(run).step == 100
    assert checkpoint.find(run / "checkpoints").step == 100
    assert checkpoint.find(run / "checkpoints" / "step-5").step == 5
    (run / "checkpoints" / "step-100" / "complete.json").unlink()
    assert checkpoint.find(run).step == 10
    assert lines(caplog) == [
        f"{run}/checkpoints/step-100 is not a complete checkpoint and is ignored: "
        "complete.json is missing, so it was never finished"
    ]


def all_files() -> list[str]:
    names = ["config.yaml", "state.json", "complete.json", "tokenizer/tokenizer.json"]
    return names + [f"{part}/{name}" for part in ("weights", "optimizer") for name in (".metadata", "__0_0.distcp")]


@pytest.mark.parametrize("name", all_files())
@pytest.mark.parametrize("how", ["truncated", "altered", "missing"])
def test_any_damaged_file_falls_back_to_the_one_before(tmp_path, caplog, name, how):
    for step in (1, 2):
        write(tmp_path / "checkpoints" / f"step-{step}", state={"step": step}, optimizer={"m": torch.ones(2)})
    path = tmp_path / "checkpoints" / "step-2" / name
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert checkpoint.find(tmp_path).step == 1
    (line,) = lines(caplog)
    assert "step-2" in line and name in line and "\n" not in line
    with pytest.raises(UserError) as error:
        checkpoint.find(tmp_path / "checkpoints" / "step-2")
    assert name in str(error.value) and "\n" not in str(error.value)


def test_every_file_is_listed(tmp_path):
    folder = write(tmp_path / "a", optimizer={"m": torch.ones(2)})
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert on_disk == set(all_files())
    assert set(json.loads((folder / "complete.json").read_text())["files"]) == on_disk - {"complete.json"}


def test_places_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.find(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a checkpoint nor a run"):
        checkpoint.find(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no checkpoint yet"):
        checkpoint.find(tmp_path)
    (tmp_path / "checkpoints" / "step-1").mkdir()
    with pytest.raises(UserError, match="none of its 1 checkpoints is complete"):
        checkpoint.find(tmp_path)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def seal(folder: Path) -> None:
    """Make complete.json agree with the files again, as an attacker would."""
    complete = json.loads((folder / "complete.json").read_text())
    for name, record in complete["files"].items():
        content = (folder / name).read_bytes()
        record.update(size=len(content), crc32=f"{zlib.crc32(content):08x}")
    (folder / "complete.json").write_text(json.dumps(complete))


@pytest.mark.parametrize("where", ["whole", "inside", "bytes"])
def test_a_hostile_metadata_is_refused_and_runs_nothing(tmp_path, where):
    folder, marker = write(tmp_path / "a"), tmp_path / "executed"
    path = folder / "weights" / ".metadata"
    if where == "whole":
        path.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        metadata = pickle.loads(path.read_bytes())
        if where == "inside":
            metadata.planner_data = Hostile(marker)
        else:  # an entry of pickled bytes, which torch's own reader would load
            metadata.state_dict_metadata["step"] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
        path.write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(UserError, match=r"\.metadata: refused to load") as error:
        checkpoint.find(folder).read_tensors()
    assert "\n" not in str(error.value)
    assert not marker.exists()


def test_a_hostile_tensor_file_is_refused_and_runs_nothing(tmp_path):
    folder, marker = write(tmp_path / "a", tensors={"x": torch.ones(2)}), tmp_path / "executed"
    path = folder / "weights" / "__0_0.distcp"
    torch.save(Hostile(marker), path)
    metadata = pickle.loads((folder / "weights" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = path.stat().st_size
    (folder / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(UserError, match="weights: refused to load") as error:
        checkpoint.find(folder).read_tensors()
    assert "\n" not in str(error.value)
    assert not marker.exists()


def test_metadata_may_not_point_out_of_its_folder(tmp_path):
    folder = write(tmp_path / "a")
    path = folder / "weights" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    path.write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(UserError, match="outside of its folder"):
        checkpoint.find(folder).read_tensors()


def test_retention(tmp_path):
    for step in (10, 20, 30, 40, 50):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-60").mkdir()  # broken: does not count, and is left for the eye
    assert [path.name for path in checkpoint.retain(tmp_path, keep=2, permanent_every=20)] == ["step-30", "step-10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-40", "step-50", "step-60"]


def test_clean_deletes_only_what_dead_processes_of_this_machine_left(tmp_path):
    host = os.uname().nodename
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stays = [f"step-1.tmp-{host}-{os.getppid()}", f"step-1.tmp-elsewhere-{dead.pid}", "step-1", "step-1.tmp-mine"]
    goes = [f"step-1.tmp-{host}-{dead.pid}", f"step-2.old.tmp-{host}-{dead.pid}", f"step-3.tmp-{host}-{os.getpid()}"]
    for name in stays + goes:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in checkpoint.clean(tmp_path)) == sorted(goes)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)
