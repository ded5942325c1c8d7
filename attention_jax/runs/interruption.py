"""Ctrl-C and SIGTERM as a request to stop after the current call, without losing anything."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType


class Interruption:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one ends the process.

    Python handles a signal when the compiled call or the compilation that is under way has ended.
    A second signal within the same call counts as the first: the run saves and stops after it.

    Attributes:
        requested: the number of the signal that arrived, or None. A program that stops because of
            it exits with `exit_status`, 128 + the signal's number: 130 or 143.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_status(self) -> int:
        """128 + the signal's number; 0 without a signal."""
        return 0 if self.requested is None else 128 + self.requested

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = number
        for either in self._previous:
            signal.signal(either, signal.SIG_DFL)
        line = (
            f"{signal.Signals(number).name}: stopping after the steps, validation or save in"
            " progress; a second signal ends at once\n"
        )
        # A handler may interrupt a print, and must not print itself.
        with contextlib.suppress(OSError):  # standard output may be closed
            os.write(1, line.encode())
