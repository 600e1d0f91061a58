"""Read the tensors of a Hugging Face folder: sharded or not, safetensors or .bin, one at a time, running no code."""

from __future__ import annotations

import json
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fast_llm_ssm.config import UserError

# The order in which transformers looks for weights.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by their names in safetensors."""


@dataclass(frozen=True)
class StoredTensor:
    """What a file says about a tensor of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


class TensorFolder:
    """The tensors in a folder's weight files. Opening it reads headers only; `read` maps one tensor from the disk.

    Args:
        folder: Holds one of `WEIGHT_FILES`, or a single .safetensors file of another name.

    Attributes:
        tensors: Every tensor by name.
        files: The files that hold them, relative to the folder.
        entry: The file that was begun with: the index, or the single one of `files`.

    Raises:
        UserError: No weights; a file is missing, truncated, outside of the folder or not of plain tensors; or the index
            and the files disagree. The message names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entry = name = _entry(folder)
        if name.endswith(".index.json"):
            where = _read_index(folder, name)
            self.files = sorted(set(where.values()))
        else:
            where = {}
            self.files = [name]
        paths = {file: inside(folder, file, f"{name} names") for file in self.files}
        if absent := [file for file, path in paths.items() if not _is_file(path)]:
            raise UserError(f"{folder}: {name} names {_listed(absent)}, which {_is_are(absent)} missing")
        self._readers = {file: _open(path) for file, path in paths.items()}
        self.tensors: dict[str, StoredTensor] = {}
        for file, reader in self._readers.items():
            for tensor, (shape, dtype) in reader.contents():
                if where and where.get(tensor) != file:
                    belongs = f"places it in {where[tensor]}" if tensor in where else "does not name it"
                    raise UserError(f"{folder}: {name} is stale: {file} holds {tensor}, but the index {belongs}")
                self.tensors[tensor] = StoredTensor(shape, dtype, file)
        if lost := [tensor for tensor in where if tensor not in self.tensors]:
            raise UserError(f"{folder}: {name} is stale: {where[lost[0]]} does not hold {_listed(lost)}")

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored, mapped from its file: don't write into it."""
        return self._readers[self.tensors[name].file].read(name)


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: truncated or not a safetensors file ({_first_line(error)})") from None

    def contents(self) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        for name in self._file.keys():
            entry = self._file.get_slice(name)
            dtype = entry.get_dtype()
            if dtype not in DTYPES:
                raise UserError(f"{self.path}: {name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
            yield name, (tuple(entry.get_shape()), DTYPES[dtype])

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class _TorchFile:
    """A .bin file: torch's zip format, mapped into memory, unpickled by the unpickler that knows tensors only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with warnings.catch_warnings(action="ignore"):  # what is odd about a file is said once, by the refusal
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a hostile or damaged pickle may raise anything
            reason = f"truncated, or more than plain tensors ({_first_line(error)})"
            raise UserError(f"{path}: refused to load, {reason}") from None
        if not isinstance(tensors, dict):
            raise UserError(f"{path}: refused to load, holds {_article(tensors)} instead of named tensors")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise UserError(f"{path}: refused to load, its entry {name!r} is {_article(tensor)}, not a tensor")
            if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
                raise UserError(f"{path}: {name} is a tensor of {tensor.layout}, {tensor.dtype}, expected a dense one")
        self._tensors: dict[str, Tensor] = tensors

    def contents(self) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        for name, tensor in self._tensors.items():
            yield name, (tuple(tensor.shape), tensor.dtype)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()


def _open(path: Path) -> _SafetensorsFile | _TorchFile:
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


def _entry(folder: Path) -> str:
    """The file to begin with: an index, or the single weights file."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    for name in WEIGHT_FILES:
        if (folder / name).exists() or (folder / name).is_symlink():
            return name
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    found = f"{len(others)} .safetensors files without an index" if others else "no weights"
    raise UserError(f"{folder}: {found}, expected one of {', '.join(WEIGHT_FILES)}")


def _read_index(folder: Path, name: str) -> dict[str, str]:
    index = read_json(inside(folder, name))
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise UserError(f"{folder / name}: no `weight_map` from tensor names to file names")
    suffix = ".safetensors" if name.startswith("model") else ".bin"
    if other := [file for file in where.values() if not file.endswith(suffix)]:
        raise UserError(f"{folder / name}: names {other[0]!r}, expected {suffix} files")
    return where


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        UserError: It is missing, damaged or of another kind.
    """
    if not _is_file(path):
        raise UserError(f"{path}: no such file")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({_first_line(error)})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {_article(content)}, expected a mapping")
    return content


def inside(folder: Path, name: str, who: str = "holds") -> Path:
    """The path of a file in a folder, once it is sure that it stays there, links followed.

    Hugging Face's cache links the files of `snapshots/REVISION` to `blobs` beside it: that counts as inside.

    Raises:
        UserError: The name leaves the folder.
    """
    root = folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    parts = Path(name).parts
    leaves = not parts or Path(name).is_absolute() or ".." in parts or "\0" in name
    if leaves or not any((folder / name).resolve().is_relative_to(allowed) for allowed in roots):
        raise UserError(f"{folder}: {who} {name!r}, which leaves the folder")
    return folder / name


def _is_file(path: Path) -> bool:
    """A regular file, links followed: a pipe or device would block or never end."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _listed(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _article(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
