"""Write Hugging Face folders: safetensors streamed one tensor at a time, put in place when complete."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fast_llm_ssm.checkpoint import LazyTensor
from fast_llm_ssm.checkpoint.folder import temporary
from fast_llm_ssm.checkpoint.storage import sync_folder
from fast_llm_ssm.config import UserError
from fast_llm_ssm.convert.io import DTYPES

SHARD_BYTES = 4 << 30
SINGLE_FILE = "model.safetensors"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INDEX = "model.safetensors.index.json"
_OF_SEVERAL = re.compile(r"-of-\d+\.")


def require_free(target: Path) -> None:
    """Raises a UserError where a new folder cannot go: something is there, other than an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists and is not empty")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, beside `target`; it takes that name when the block ends, and vanishes if the block fails.

    Raises:
        UserError: `target` exists and is not empty.
    """
    require_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = temporary(target)
    shutil.rmtree(aside, ignore_errors=True)  # of a dead process with the same id
    aside.mkdir()
    try:
        yield aside
        for path in aside.iterdir():
            sync_folder(path)  # of a file: its bytes
        sync_folder(aside)
        aside.rename(target)  # replaces an empty folder
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write one file: the header first, then each tensor as it is produced. One tensor is in memory at a time."""
    # Widest elements first, as the format's own library has it: every tensor then starts at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        end = start + _num_bytes(tensors[name])
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes(name, tensors[name]))


def write_torch(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write torch's own format. Tensors wait in files of their own, so that one is in memory at a time.

    What is the same lazy tensor under several names is stored once.
    """
    with TemporaryDirectory(dir=path.parent) as scratch:
        mapped: dict[int, Tensor] = {}
        for lazy in tensors.values():
            if id(lazy) not in mapped:
                file, size = f"{scratch}/{len(mapped)}", torch.Size(lazy.shape).numel()
                tensor = torch.from_file(file, shared=True, size=size, dtype=lazy.dtype).view(tuple(lazy.shape))
                mapped[id(lazy)] = tensor.copy_(lazy.load().detach())
        torch.save({name: mapped[id(lazy)] for name, lazy in tensors.items()}, path)


def write_shards(folder: Path, tensors: Mapping[str, LazyTensor], files: Mapping[str, str] | None = None) -> list[str]:
    """Write tensors as one file or several with an index.

    Args:
        folder: Exists.
        tensors: By name.
        files: The file of each tensor; by default they are filled in order, up to `SHARD_BYTES` each.
            One in torch's own format (.bin) is the only one.

    Returns:
        The files written.
    """
    files = files or _fill(tensors)
    shards: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(files[name], {})[name] = tensor
    for file in sorted(shards):
        write = write_torch if file.endswith(".bin") else write_safetensors
        write(folder / file, shards[file])
    if len(shards) == 1 and not _OF_SEVERAL.search(file):
        return [file]
    total = sum(_num_bytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[name] for name in sorted(tensors)}}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*sorted(shards), _INDEX]


def _fill(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    shard, size = 0, 0
    shards = {}
    for name, tensor in tensors.items():
        if size and size + _num_bytes(tensor) > SHARD_BYTES:
            shard, size = shard + 1, 0
        size += _num_bytes(tensor)
        shards[name] = shard
    if not shard:
        return dict.fromkeys(tensors, SINGLE_FILE)
    return {name: f"model-{index + 1:05}-of-{shard + 1:05}.safetensors" for name, index in shards.items()}


def _num_bytes(tensor: LazyTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _bytes(name: str, lazy: LazyTensor) -> memoryview:
    tensor: Tensor = lazy.load()
    assert tuple(tensor.shape) == tuple(lazy.shape) and tensor.dtype == lazy.dtype, name
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
