"""Ctrl-C and SIGTERM as a request to stop at the next boundary, with nothing lost."""

from __future__ import annotations

import signal
from types import FrameType

from attention_jax.training import processes


class Interruption:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one ends the process.

    Attributes:
        requested: the signal's number once it came, else None. A program that stops because of it
            exits with `exit_status`, 128 + the signal's number, as shells do: 130 or 143.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_status(self) -> int:
        """0 if nothing was requested."""
        return 0 if self.requested is None else 128 + self.requested

    def agreed(self) -> bool:
        """Whether to stop, the same on all processes: they stop together if one is asked to."""
        number = processes.largest(self.requested or 0)
        if number:
            self.requested = number
        return bool(number)

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
