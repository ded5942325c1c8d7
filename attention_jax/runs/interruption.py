"""Ctrl-C and SIGTERM as a request to stop at the next boundary, with nothing lost."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from attention_jax.runs import processes


class Interruption:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one ends the process.

    Python looks at signals once a compiled call or a compilation is over, which may take minutes.
    Where both come before that, a thread beside it ends the process, with the same exit status to a
    shell as the signal's own default, which is what comes after.

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
        if number and self.requested is None:
            self._handle(number, None)  # here too the next one is the second
        return bool(number)

    def __enter__(self) -> Interruption:
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._watching = threading.Thread(target=_end_at_the_second, args=(read,), daemon=True)
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


def _end_at_the_second(read: int) -> None:
    """Reads the numbers of signals, a byte each, until the other end is closed."""
    came = 0
    while number := os.read(read, 1):
        came += number[0] in _NUMBERS
        if came == 2:
            os._exit(128 + number[0])
    os.close(read)
