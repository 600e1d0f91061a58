"""Weight files: read lazily and safely, written as a stream."""

from __future__ import annotations

import json
import os
import pickle
import weakref
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.io import TensorFolder, inside, read_json
from fast_llm_ssm.convert.write import new_folder, write_safetensors, write_shards

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 3, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
        "c": torch.randn(2, 2, 2, generator=generator).half(),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "ids": torch.arange(7),
    }


def lazy(values: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(tuple(value.shape), value.dtype, partial(values.get, name)) for name, value in values.items()
    }


def sharded(folder: Path, suffix: str = "safetensors") -> Path:
    """Two shards and an index."""
    folder.mkdir()
    kind = "model" if suffix == "safetensors" else "pytorch_model"
    names = [f"{kind}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    parts = [{"a": torch.ones(3), "b": torch.zeros(2)}, {"c": torch.full((2, 2), 2.0)}]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name) if suffix == "safetensors" else torch.save(part, folder / name)
    where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / f"{kind}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def refused(folder: Path, *words: str) -> None:
    """One line, with these words in it."""
    with pytest.raises(UserError) as caught:
        TensorFolder(folder)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_one_tensor_at_a_time(tmp_path: Path, suffix: str) -> None:
    files = TensorFolder(sharded(tmp_path / "hf", suffix))
    shapes = {name: (stored.shape, stored.dtype) for name, stored in files.tensors.items()}
    assert shapes == {"a": ((3,), torch.float32), "b": ((2,), torch.float32), "c": ((2, 2), torch.float32)}
    assert torch.equal(files.read("c"), torch.full((2, 2), 2.0))
    assert files.tensors["a"].file != files.tensors["c"].file


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_missing_shard_is_named(tmp_path: Path, suffix: str) -> None:
    folder = sharded(tmp_path / "hf", suffix)
    (gone,) = folder.glob(f"*00002-of*.{suffix}")
    gone.unlink()
    refused(folder, gone.name, "missing")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, suffix: str, size: int) -> None:
    folder = sharded(tmp_path / "hf", suffix)
    (shard,) = folder.glob(f"*00001-of*.{suffix}")
    os.truncate(shard, size if size >= 0 else shard.stat().st_size - 1)
    refused(folder, shard.name)


def test_an_index_of_thirty_files_with_fifteen_there(tmp_path: Path) -> None:
    names = [f"model-{i:05}-of-00030.safetensors" for i in range(1, 31)]
    for i, name in enumerate(names[:15]):
        save_file({f"t{i}": torch.zeros(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))
    refused(tmp_path, names[15], "and 12 more", "are missing")


def test_a_stale_index_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf")
    where = read_json(folder / INDEX)["weight_map"]
    for changed, words in (
        ({**where, "d": where["c"]}, ("stale", "does not hold d")),
        ({name: file for name, file in where.items() if name != "b"}, ("stale", "holds b", "does not name it")),
        ({**where, "b": where["c"]}, ("stale", "holds b", "places it in")),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(folder, INDEX, *words)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000]
)
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    refused(tmp_path, INDEX)


def test_names_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    folder, outside = sharded(tmp_path / "hf"), tmp_path / "outside.safetensors"
    save_file({"a": torch.ones(3)}, outside)
    (folder / "link.safetensors").symlink_to(outside)
    for name in ("../outside.safetensors", str(outside), "link.safetensors", "x/../../outside.safetensors"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        refused(folder, repr(name), "leaves the folder")
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to(tmp_path / "elsewhere.json")
    refused(folder, INDEX, "leaves the folder")


def test_a_single_file_that_links_elsewhere_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(folder, "leaves the folder")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(3)}, blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert torch.equal(TensorFolder(snapshot).read("a"), torch.ones(3))


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors")


def test_a_folder_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    refused(tmp_path, "no weights", "model.safetensors")
    refused(tmp_path / "absent", "no such folder")


class Hostile:
    """Unpickles to a call that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.marker}",))


class HostileTensors(dict):
    """Looks like named tensors until it is unpickled."""

    def __init__(self, marker: Path) -> None:
        super().__init__(a=torch.ones(2))
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (exec, (f"open({str(self.marker)!r}, 'w').close()",))


@pytest.mark.parametrize("kind", ["whole", "value", "key", "subclass", "plain pickle", "legacy", "torchscript", "zip"])
def test_no_pickle_can_run_code(tmp_path: Path, kind: str) -> None:
    marker, path = tmp_path / "ran", tmp_path / "hf" / "pytorch_model.bin"
    path.parent.mkdir()
    hostile = Hostile(marker)
    if kind == "whole":
        torch.save(hostile, path)
    elif kind == "value":
        torch.save({"a": torch.ones(2), "b": hostile}, path)
    elif kind == "key":
        torch.save({("a", hostile): torch.ones(2)}, path)
    elif kind == "subclass":
        torch.save(HostileTensors(marker), path)
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps({"a": hostile}))
    elif kind == "legacy":
        torch.save({"a": torch.ones(2), "b": hostile}, path, _use_new_zipfile_serialization=False)
    elif kind == "torchscript":
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(hostile))
            archive.writestr("archive/version", "3")
    refused(path.parent, path.name, "refused to load")
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        {"a": [1, 2]},
        {"state_dict": {"a": torch.ones(2)}},
        {1: torch.ones(2)},
        {"a": torch.eye(3).to_sparse()},
    ],
    ids=["list", "numbers", "nested", "number as name", "sparse"],
)
def test_a_bin_file_holds_named_dense_tensors_only(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin")


def test_what_is_written_is_what_the_library_writes(tmp_path: Path) -> None:
    values = tensors()
    write_safetensors(tmp_path / "ours.safetensors", lazy(values))
    read = load_file(tmp_path / "ours.safetensors")
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value), name
    save_file(values, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_shards_are_filled_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fast_llm_ssm.convert.write.SHARD_BYTES", 100)
    values = {name: torch.full((10,), float(i)) for i, name in enumerate("abcde")}
    written = write_shards(tmp_path, lazy(values))
    assert written == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX]
    assert read_json(tmp_path / INDEX)["metadata"]["total_size"] == 200
    files = TensorFolder(tmp_path)
    assert files.tensors.keys() == values.keys()
    assert all(torch.equal(files.read(name), value) for name, value in values.items())


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: set[str] = set()

    def load(name: str) -> torch.Tensor:
        assert len(alive) <= 1, alive  # the one before goes when this one has come
        tensor = torch.ones(1000)
        alive.add(name)
        weakref.finalize(tensor, alive.discard, name)
        return tensor

    write_safetensors(
        tmp_path / "a.safetensors",
        {name: LazyTensor((1000,), torch.float32, partial(load, name)) for name in "abcdefgh"},
    )
    assert len(load_file(tmp_path / "a.safetensors")) == 8


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError, match="halfway"), new_folder(target) as folder:
        (folder / "x").write_text("x")
        assert not target.exists()
        raise RuntimeError("halfway")
    assert list(target.parent.iterdir()) == []
    target.mkdir()
    with new_folder(target) as folder:
        (folder / "x").write_text("x")
    assert [path.name for path in target.parent.iterdir()] == ["out"] and (target / "x").read_text() == "x"
    with pytest.raises(UserError, match="not empty"), new_folder(target):
        pass
    assert (target / "x").read_text() == "x"


def test_inside_keeps_subfolders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert inside(tmp_path, "sub/x.safetensors") == tmp_path / "sub/x.safetensors"
    for name in ("", "\0", "..", "/etc/passwd"):
        with pytest.raises(UserError, match="leaves the folder"):
            inside(tmp_path, name)
