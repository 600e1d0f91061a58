"""Numbers of each step, into metrics.jsonl always and other sinks besides."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, float | int]


class Sink(Protocol):
    """Takes the metrics of a step; each step once, in order."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line.

    Args:
        path: The file; rows of steps beyond `step` that an earlier process left in it are dropped.
        step: Where training goes on.
    """

    def __init__(self, path: Path, step: int) -> None:
        rows = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        aside = path.with_name(f"{path.name}.tmp")
        aside.write_text("".join(f"{line}\n" for line in rows))
        os.replace(aside, path)
        self._file = path.open("a")

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """Lines that were written to their end."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


class TensorBoard:
    """Curves for tensorboard.

    Args:
        folder: Where its files go.
        step: Where training goes on; what it knows of later steps is forgotten.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()
