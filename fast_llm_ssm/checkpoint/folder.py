"""Checkpoint folders: written aside, complete or ignored, kept by count and by step."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fast_llm_ssm.checkpoint.find import COMPLETE, FORMAT, damage, steps
from fast_llm_ssm.checkpoint.storage import FileRecord, LazyTensor, sync_folder, synced_file, write_file, write_tensors
from fast_llm_ssm.config import UserError

_COPY_BYTES = 4 << 20
FileContent = Path | bytes | str  # a file to copy, or what to write


class SavesItself(Protocol):
    """A tokenizer, as far as checkpoints are concerned."""

    def save(self, folder: Path) -> None: ...


def save(
    folder: Path | str,
    *,
    tensors: Mapping[str, Tensor | LazyTensor],
    config_yaml: str,
    optimizer: Mapping[str, Tensor | LazyTensor] | None = None,
    state: Mapping[str, Any] | None = None,
    tokenizer: SavesItself | Mapping[str, FileContent] | None = None,
    source_files: Mapping[str, FileContent] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint folder; it appears under its name only when it is complete and on the disk.

    Args:
        folder: The new checkpoint. Its parents are created.
        tensors: Native parameter name to tensor, for `weights/`. A `LazyTensor` is loaded when its turn comes.
        config_yaml: Text of the run file, for `config.yaml`.
        optimizer: The same for `optimizer/`.
        state: Plain JSON values (step, samples, ...), for `state.json`.
        tokenizer: Something with `save(folder)`, or file names and contents, for `tokenizer/`.
        source_files: File names and contents, for `source/`.
        overwrite: Replace a folder that exists, once the new one is complete.

    Returns:
        The folder.

    Raises:
        UserError: The folder exists and is not empty.
    """
    folder = Path(folder)
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    target = temporary(folder)
    target.mkdir()
    try:
        records = {"config.yaml": write_file(target / "config.yaml", config_yaml.encode())}
        records |= _within("weights", write_tensors(target / "weights", tensors))
        if optimizer is not None:
            records |= _within("optimizer", write_tensors(target / "optimizer", optimizer))
        if state is not None:
            records["state.json"] = write_file(target / "state.json", json.dumps(dict(state), indent=1).encode())
        if isinstance(tokenizer, Mapping):
            records |= _within("tokenizer", _write_files(target / "tokenizer", tokenizer))
        elif tokenizer is not None:
            records |= _within("tokenizer", _saved_by(target / "tokenizer", tokenizer.save))
        if source_files is not None:
            records |= _within("source", _write_files(target / "source", source_files))
        complete = {"format": FORMAT, "files": {name: asdict(records[name]) for name in sorted(records)}}
        write_file(target / COMPLETE, json.dumps(complete, indent=1).encode())
        sync_folder(target)
        if folder.exists():
            _remove(folder)
        target.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return folder


def _within(folder: str, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
    return {f"{folder}/{name}": record for name, record in records.items()}


def _write_files(folder: Path, files: Mapping[str, FileContent]) -> dict[str, FileRecord]:
    folder.mkdir()
    records = {}
    for name, content in files.items():
        assert Path(name).name == name, name
        if isinstance(content, Path):
            with content.open("rb") as source, synced_file(folder / name) as stream:
                while chunk := source.read(_COPY_BYTES):
                    stream.write(chunk)
            records[name] = stream.record
        else:
            records[name] = write_file(folder / name, content.encode() if isinstance(content, str) else content)
    sync_folder(folder)
    return records


def _saved_by(folder: Path, save_to: Callable[[Path], None]) -> dict[str, FileRecord]:
    """Let an object write its files, then rewrite them synced and checksummed."""
    folder.mkdir()
    save_to(folder)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: write_file(path, path.read_bytes()) for name, path in files.items()}


def temporary(folder: Path) -> Path:
    """A sibling of the folder that names who writes it, so that leftovers can be told from work in progress."""
    return folder.with_name(f"{folder.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def _remove(folder: Path) -> None:
    """Delete a folder such that a kill halfway leaves no half a checkpoint under its name."""
    aside = folder.with_name(f"{folder.name}.old.tmp-{socket.gethostname()}-{os.getpid()}")
    folder.rename(aside)
    shutil.rmtree(aside)


def clean(folder: Path | str) -> list[Path]:
    """Delete what dead processes of this machine left behind half written.

    Call it before this process saves anything: leftovers under its own process id are then those of a dead namesake.

    Args:
        folder: Holds the checkpoints (`runs/NAME/checkpoints`).

    Returns:
        The folders deleted.
    """
    deleted = []
    for path in sorted(Path(folder).glob("*.tmp-*")):
        host, _, pid = path.name.rpartition(".tmp-")[2].rpartition("-")
        if host == socket.gethostname() and pid.isdecimal() and (int(pid) == os.getpid() or not _alive(int(pid))):
            shutil.rmtree(path)
            deleted.append(path)
    return deleted


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def retain(folder: Path | str, keep: int, permanent_every: int | None = None) -> list[Path]:
    """Delete old checkpoints.

    Args:
        folder: Holds `step-N` folders.
        keep: Number of newest complete checkpoints to keep.
        permanent_every: Checkpoints of steps that this divides stay for good.

    Returns:
        The folders deleted.
    """
    assert keep >= 1
    deleted = []
    complete = [step for step in steps(Path(folder)) if damage(step, checksums=False) is None]
    for path in complete[keep:]:
        step = int(path.name.removeprefix("step-"))
        if not (permanent_every and step % permanent_every == 0):
            _remove(path)
            deleted.append(path)
    return deleted
