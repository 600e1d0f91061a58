"""Signals end the step, not the process. Imports nothing heavy, so that it can be set up first of all."""

from __future__ import annotations

import signal
from types import FrameType

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: run the same command again and it goes on."""


class StopSignal:
    """Remembers that SIGTERM or SIGINT has arrived; a second one acts at once, as it would without this.

    Attributes:
        received: Name of the signal, None before.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self.restore()

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
