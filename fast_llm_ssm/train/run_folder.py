"""The folder of a run: its lock, its configuration, its checkpoints, and whether this run may go on from them."""

from __future__ import annotations

import fcntl
from typing import IO, Any, Self

import yaml
from pydantic import ValidationError

from fast_llm_ssm import checkpoint
from fast_llm_ssm.checkpoint import Checkpoint
from fast_llm_ssm.config import UserError, dump, read_yaml
from fast_llm_ssm.data import Dataset, changed_parts
from fast_llm_ssm.train.config import RunConfig, RunModelConfig

_MAX_LISTED = 8


class RunFolder:
    """runs/NAME, held by one process at a time.

    Attributes:
        path: The folder.
        checkpoints: Its folder of checkpoints.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.name is not None
        self.path = config.runs / config.name
        self.checkpoints = self.path / "checkpoints"
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        """Take the folder.

        Raises:
            UserError: Another process has it, or it cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("a")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.path}: another process is training in this folder") from None
        checkpoint.clean(self.checkpoints)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def write_config(self, config: RunConfig) -> None:
        """Keep what this run really runs with."""
        (self.path / "config.yaml").write_text(dump(config))

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; broken ones are lines in the log."""
        return checkpoint.newest(self.checkpoints)


def checkpoint_yaml(config: RunConfig) -> str:
    """The configuration as a checkpoint keeps it: it stands on its own, so its model starts from nowhere."""
    return dump(config.model_copy(update={"model": config.model.model_copy(update={"start_from": None})}))


def refuse_other_model(saved: Checkpoint, config: RunConfig) -> None:
    """Resuming needs the model that the checkpoint holds.

    Raises:
        UserError: Names the keys that differ.
    """
    before = saved.config["model"]
    try:
        before = _plain(
            RunModelConfig.model_validate(before)
        )  # keys that are newer than the checkpoint get their defaults
    except ValidationError:
        pass
    _refuse(saved, [f"model.{line}" for line in differences(before, _plain(config.model))])


def refuse_other_data(saved: Checkpoint, dataset: Dataset) -> None:
    """Resuming needs the very rows of the run.

    Raises:
        UserError: Names the keys that differ.
    """
    _refuse(saved, changed_parts(saved.state["data"], dataset.parts))


def _refuse(saved: Checkpoint, lines: list[str]) -> None:
    if lines:
        listed = "; ".join(lines[:_MAX_LISTED]) + (
            f"; and {len(lines) - _MAX_LISTED} more" * (len(lines) > _MAX_LISTED)
        )
        raise UserError(
            f"{saved.path}: this run cannot go on with another model or other data; changed: {listed}. "
            "Undo the change, or give the run another name"
        )


def changed_settings(saved: Checkpoint, config: RunConfig) -> list[str]:
    """What has changed since, apart from model and data: allowed, but worth a line."""
    ignored = ("name", "runs", "plugins", "model", "data", "log")
    before, now = ({k: v for k, v in tree.items() if k not in ignored} for tree in (saved.config, _plain(config)))
    return differences(before, now)


def _plain(config: Any) -> dict[str, Any]:
    tree = read_yaml(dump(config))
    tree.pop("from", None)
    return tree


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """`key: old -> new` for each leaf that differs between two trees."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(str(key), before.get(key), now.get(key)) for key in before | now]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(index), old, new) for index, (old, new) in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [f"{path}: {_short(before)} -> {_short(now)}"]
    return [line for key, old, new in pairs for line in differences(old, new, f"{path}.{key}" if path else key)]


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= 60 else text[:57] + "..."
