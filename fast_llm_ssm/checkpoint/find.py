"""Find complete checkpoints and read them."""

import json
import logging
import re
import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from fast_llm_ssm.checkpoint.storage import read_into, read_metadata, read_tensors
from fast_llm_ssm.config import UserError, read_yaml

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"  # written last: what lacks it, or disagrees with it, is not a checkpoint
FORMAT = "fast_llm_ssm checkpoint 1"
_READ_BYTES = 4 << 20


class Checkpoint:
    """A complete checkpoint folder. Tensors are read when asked for, never all at once.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config_yaml(self) -> str:
        """Text of the run file that the checkpoint was written with."""
        return (self.path / "config.yaml").read_text()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run file as plain data, not validated."""
        return read_yaml(self.config_yaml, str(self.path / "config.yaml"))

    @cached_property
    def state(self) -> dict[str, Any]:
        """Content of `state.json` (step, samples, ...); empty for weights without a training state."""
        path = self.path / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def step(self) -> int | None:
        """Number of training steps done, None for weights without a training state."""
        return self.state.get("step")

    def folder(self, name: str) -> Path | None:
        """A part of the checkpoint (`tokenizer`, `source`, `optimizer`), None if it has none."""
        path = self.path / name
        return path if path.is_dir() else None

    @cached_property
    def _weights(self) -> Metadata:
        return read_metadata(self.path / "weights")

    @cached_property
    def _optimizer(self) -> Metadata:
        return read_metadata(self.path / "optimizer")

    @property
    def tensor_names(self) -> list[str]:
        """Names of the weights, sorted."""
        return sorted(self._weights.state_dict_metadata)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each weight."""
        return {name: entry.size for name, entry in self._weights.state_dict_metadata.items()}  # type: ignore[union-attr]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Stored element type of each weight."""
        return {name: entry.properties.dtype for name, entry in self._weights.state_dict_metadata.items()}  # type: ignore[union-attr]

    def read_tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read the named weights (all by default), and only those, on the CPU in their stored dtype."""
        names = self.tensor_names if names is None else list(names)
        self._require(names, self._weights, "weights")
        return read_tensors(self.path / "weights", self._weights, names)

    def read_optimizer(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The same for the optimizer's tensors."""
        names = sorted(self._optimizer.state_dict_metadata) if names is None else list(names)
        self._require(names, self._optimizer, "optimizer")
        return read_tensors(self.path / "optimizer", self._optimizer, names)

    def load_into(self, model: nn.Module) -> None:
        """Read the weights into a model's parameters and buffers, cast to their dtype and device.

        Raises:
            UserError: The two do not have the same tensors with the same shapes; nothing was read.
        """
        self._load_into(model.state_dict(), "weights", self._weights)

    def load_optimizer_into(self, tensors: dict[str, Tensor]) -> None:
        """Read the optimizer's tensors into existing ones of the same names."""
        self._load_into(tensors, "optimizer", self._optimizer)

    def _load_into(self, targets: dict[str, Tensor], part: str, metadata: Metadata) -> None:
        self._require(targets, metadata, part)
        if extra := sorted(set(metadata.state_dict_metadata) - set(targets)):
            raise UserError(f"{self.path}: {part} hold {_listed(extra)}, which the model does not have")
        for name, target in targets.items():
            stored = tuple(metadata.state_dict_metadata[name].size)  # type: ignore[union-attr]
            if stored != tuple(target.shape):
                raise UserError(f"{self.path}: {part}: {name} has shape {stored}, the model's {tuple(target.shape)}")
        read_into(self.path / part, metadata, targets)

    def _require(self, names: Iterable[str], metadata: Metadata, part: str) -> None:
        if missing := sorted(set(names) - set(metadata.state_dict_metadata)):
            raise UserError(f"{self.path}: {part} lack {_listed(missing)}")


def _listed(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def steps(folder: Path) -> list[Path]:
    """The `step-N` folders in a folder, newest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def damage(folder: Path, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, naming the file; None for a complete one.

    Args:
        folder: The folder to look at.
        checksums: Read every file; otherwise only names and sizes are compared.
    """
    try:
        complete = json.loads((folder / COMPLETE).read_bytes())
    except FileNotFoundError:
        return f"{COMPLETE} is missing, so it was never finished"
    except (OSError, ValueError) as error:
        return f"{COMPLETE} cannot be read ({error})"
    files = complete.get("files") if isinstance(complete, dict) else None
    if not isinstance(files, dict) or not {"config.yaml", "weights/.metadata"} <= files.keys():
        return f"{COMPLETE} does not list a checkpoint's files"
    if complete.get("format") != FORMAT:
        return f"{COMPLETE} says format {complete.get('format')!r}, expected {FORMAT!r}"
    for name, record in files.items():
        try:
            size, expected = (folder / name).stat().st_size, record["size"]
            if size != expected:
                return f"{name} has {size:,} bytes instead of {expected:,}"
            if checksums and _crc32(folder / name) != record["crc32"]:
                return f"{name} was altered (its checksum differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except (KeyError, TypeError):
            return f"{COMPLETE} does not list a checkpoint's files"
    return None


def _crc32(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete `step-N` of a folder, if there is one; each broken one passed over is a line in the log."""
    for path in steps(folder):
        problem = damage(path)
        if problem is None:
            return Checkpoint(path)
        logger.warning("%s is not a complete checkpoint and is ignored: %s", path, problem)
    return None


def find(path: Path | str) -> Checkpoint:
    """Open a checkpoint, or the newest complete one of a run.

    Args:
        path: A checkpoint folder, a run folder (`runs/NAME`) or its `checkpoints` folder.

    Returns:
        The checkpoint, all of its files verified.

    Raises:
        UserError: There is none, or the one that was named is broken (the message names the file).
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder, expected a checkpoint or a run")
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and steps(folder):
            if checkpoint := newest(folder):
                return checkpoint
            raise UserError(f"{path}: none of its {len(steps(folder))} checkpoints is complete")
    if (path / "checkpoints").is_dir():
        raise UserError(f"{path}: this run has no checkpoint yet")
    if not any((path / name).exists() for name in (COMPLETE, "weights")):
        raise UserError(f"{path}: neither a checkpoint nor a run folder")
    if problem := damage(path):
        raise UserError(f"{path}: broken checkpoint, {problem}")
    return Checkpoint(path)
