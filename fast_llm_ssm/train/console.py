"""What a person sees: lines that stay, also in a log file, and the live line of the newest step."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_REFRESHES_PER_SECOND = 4


class Reporter(logging.Handler):
    """Prints to the terminal and to a log file; on a terminal the line of the newest step stays at the bottom.

    While it is open it also prints what the package logs, and Python's warnings: each is a line like any other.

    Args:
        path: The log file, which is appended to.
        seconds: Time between two lines of progress where the output is no terminal.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(logging.INFO)
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=_REFRESHES_PER_SECOND, transient=True)
        self._file = path.open("a")
        self._seconds = seconds if not self._console.is_terminal else max(seconds, 60.0)
        self._shown = float("-inf")

    def __enter__(self) -> Self:
        logger = logging.getLogger("fast_llm_ssm")
        logger.addHandler(self)
        self._level, self._propagate = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        self._showwarning, warnings.showwarning = warnings.showwarning, self._warn
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._console.is_terminal:
            self._live.update(Text(""))
            self._live.stop()
        logger = logging.getLogger("fast_llm_ssm")
        logger.removeHandler(self)
        logger.setLevel(self._level)
        logger.propagate = self._propagate
        warnings.showwarning = self._showwarning
        if error is not None:  # whoever catches it prints it
            self._file.write(f"{'error':8}{type(error).__name__}: {error}\n")
        self._file.close()

    def emit(self, record: logging.LogRecord) -> None:
        label = "warning" if record.levelno >= logging.WARNING else "note"
        self.say(label, record.getMessage())

    def _warn(self, message: Warning | str, *args: object, **kwargs: object) -> None:
        self.say("warning", str(message).splitlines()[0])

    def say(self, label: str, text: str) -> None:
        """A line that stays."""
        styled = Text(f"{label:8}", style="bold").append(text, style="not bold")
        self._console.print(styled)
        self._file.write(styled.plain + "\n")
        self._file.flush()

    def block(self, title: str, text: str) -> None:
        """Several lines that stay, as they are."""
        self.say(title, "")
        self._console.print(Text(text))
        self._file.write(text + "\n")
        self._file.flush()

    def progress(self, text: str, force: bool = False) -> None:
        """The newest step. Without a terminal, and in the log file, only a line from time to time.

        Args:
            text: The line.
            force: Let it stay whatever the time.
        """
        now = time.monotonic()
        stays = force or now - self._shown >= self._seconds
        if stays:
            self._shown = now
            self.say("step", text)
        if self._console.is_terminal:
            self._live.update(Text("") if stays else Text(f"{'step':8}{text}"))
