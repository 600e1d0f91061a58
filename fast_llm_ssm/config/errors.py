"""What a user did wrong, as lines that a terminal can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class UserError(ValueError):
    """A failure that the user can mend. Commands print its text, without a traceback, and exit with code 2."""


@dataclass(frozen=True)
class ConfigError:
    """One mistake: where it was written, which key, and what was expected.

    `file` is the run file, or "override 'a.b=1'" for a value from the command line (then `line` is None).
    `path` is dotted, as in `model.blocks.m.0.mixer.d_state`; "" is the whole file.
    """

    file: str
    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.path, self.message) if part)


class ConfigErrors(UserError):
    """All mistakes of one run file."""

    def __init__(self, errors: Sequence[ConfigError]):
        self.errors = list(errors)
        count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
        super().__init__("\n".join([*map(str, self.errors), f"{count}; nothing was started."]))
