"""Ctrl-C and SIGTERM as a request to stop after the current call, without losing anything."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from attention_jax.runs import processes
from attention_jax.runs.progress import announce


class Interruption:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one ends the process.

    Python handles signals only after a compiled call or a compilation, and a validation goes on to
    its end: that may take minutes. A thread says so at once in one line. If two signals arrive
    before Python handles the first, the thread ends the process with the signal's usual exit
    status.

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

    def agreed(self) -> bool:
        """Whether to stop: the same on all processes, which stop together if one of them should."""
        number = processes.largest(self.requested or 0)
        if number and self.requested is None:
            self._handle(number, None)  # the next signal counts as the second on this process too
        return bool(number)

    def __enter__(self) -> Interruption:
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._watching = threading.Thread(target=_watch, args=(read,), daemon=True)
        self._watching.start()
        self._previous_write = signal.set_wakeup_fd(self._write)
        for number in _NUMBERS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_write)
        os.close(self._write)
        self._watching.join()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = number
        for either in self._previous:
            signal.signal(either, signal.SIG_DFL)


_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def _watch(read: int) -> None:
    """Reads the numbers of signals, one byte each, until the pipe is closed."""
    received = 0
    while number := os.read(read, 1):
        received += number[0] in _NUMBERS
        if received == 1:
            announce(
                f"{signal.Signals(number[0]).name}: stopping after the steps, validation or save in"
                " progress; a second signal ends at once"
            )
        if received == 2:
            os._exit(128 + number[0])
    os.close(read)
