"""Tensors to and from a folder in torch's distributed checkpoint format, and nothing but tensors.

torch's own writer keeps every tensor of a file alive until the file is closed, and its reader unpickles `.metadata`
without looking. Here a tensor is produced, written and dropped before the next one, checksums are taken while the bytes
pass by, and `.metadata` may only name known classes.
"""

import io
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fast_llm_ssm.config import UserError


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is produced when it is written, so that only one of them is in memory at a time.

    Attributes:
        shape: Shape of the tensor.
        dtype: Element type of the tensor.
        load: Produces the tensor; called once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a written file."""

    size: int
    crc32: str


class ChecksumStream:
    """A binary stream to write to that counts and checksums what passes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._crc = 0
        self._size = 0

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        self._size += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, f"{self._crc:08x}")


@contextmanager
def synced_file(path: Path) -> Iterator[ChecksumStream]:
    """A new file whose bytes are on the disk when the block is left."""
    with path.open("wb") as file:
        stream = ChecksumStream(file)
        yield stream
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write and sync a small file."""
    with synced_file(path) as stream:
        stream.write(content)
    return stream.record


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder (creations, renames) durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Planner(dcp.DefaultSavePlanner):
    """Plans lazy tensors from their shape and dtype, and loads them when their turn has come."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        self._lazy = {name: value for name, value in state_dict.items() if isinstance(value, LazyTensor)}
        planned = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") if name in self._lazy else value
            for name, value in state_dict.items()
        }
        super().set_up_planner(planned, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        lazy = self._lazy.get(index.fqn)
        if lazy is None:
            return super().lookup_object(index)
        tensor = lazy.load()
        if tuple(tensor.shape) != tuple(lazy.shape) or tensor.dtype != lazy.dtype:
            raise ValueError(
                f"{index.fqn}: expected {tuple(lazy.shape)} {lazy.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )
        return tensor


class _Writer(dcp.FileSystemWriter):
    """One file per rank, one tensor in memory at a time, checksums on the way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.records: dict[str, FileRecord] = {}

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        results = []
        name = f"{plan.storage_data.prefix}0.distcp"
        with synced_file(self.folder / name) as stream:
            for item in plan.items:
                start = stream.tell()
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                tensor = tensor.detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save would write the whole storage
                    tensor = tensor.clone()
                torch.save(tensor, cast(IO[bytes], stream))
                del tensor
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        self.records[name] = stream.record
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # no paths: the folder is renamed when it is complete


# What a `.metadata` written by the writer above is made of.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
}


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read `.metadata` of a folder of tensors without running anything that it may ask for.

    Raises:
        UserError: The file is missing, damaged, or holds anything other than descriptions of tensors in this folder.
    """
    path = folder / ".metadata"
    try:
        metadata = _AllowListUnpickler(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{path}: refused to load, not the description of tensors that it should be: {error}") from None
    tensors = getattr(metadata, "state_dict_metadata", None)
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise UserError(f"{path}: refused to load, not the description of tensors that it should be")
    for name, value in tensors.items():
        if not isinstance(value, TensorStorageMetadata):
            raise UserError(f"{path}: refused to load, {name!r} is not a tensor")
    for info in stored.values():
        if info.relative_path != Path(info.relative_path).name or getattr(info, "transform_descriptors", None):
            raise UserError(f"{path}: refused to load, it points at {info.relative_path!r} outside of its folder")
    return metadata


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _single_process() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


@contextmanager
def _plain() -> Iterator[None]:
    """No warning about a single process, which is the normal case here, and failures as themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # a BaseException that wraps what went wrong on each rank
            raise next(iter(error.failures.values()))[0] from None


def write_tensors(folder: Path, tensors: Mapping[str, Tensor | LazyTensor]) -> dict[str, FileRecord]:
    """Write tensors into a new folder.

    Args:
        folder: Created here.
        tensors: Name to tensor; lazy ones are loaded one at a time.

    Returns:
        The files written, relative to the folder, with size and checksum.
    """
    folder.mkdir()
    writer = _Writer(folder)
    with _plain():
        dcp.save(dict(tensors), storage_writer=writer, planner=_Planner(), no_dist=_single_process())
    metadata = (folder / ".metadata").read_bytes()
    writer.records[".metadata"] = FileRecord(len(metadata), f"{zlib.crc32(metadata):08x}")
    sync_folder(folder)
    return writer.records


def read_into(folder: Path, metadata: Metadata, targets: Mapping[str, Tensor]) -> None:
    """Read tensors into existing ones (cast and moved as needed), one at a time."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _plain(), torch.no_grad():
            dcp.load(
                dict(targets), storage_reader=_Reader(folder, metadata), planner=planner, no_dist=_single_process()
            )
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {named[1]}" if named else "not a plain tensor"
        raise UserError(f"{folder}: refused to load, {what}") from None


def read_tensors(folder: Path, metadata: Metadata, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors, and no others, in their stored shape and dtype on the CPU."""
    targets = {}
    for name in names:
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        targets[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_into(folder, metadata, targets)
    return targets
