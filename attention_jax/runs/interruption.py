"""Ctrl-C, SIGTERM and a hang-up ask to stop after the current call, without losing anything."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType

from attention_jax.runs.processes import exchanged


class Interruption:
    """While entered, the first signal sets `requested`; a second one ends the process.

    The signals are SIGINT, SIGTERM and, when the terminal closes, SIGHUP. A second SIGHUP is
    ignored, because a shell repeats that of the terminal; under `nohup` every SIGHUP is ignored.
    Outside of the main thread, where Python handles no signals, nothing changes.

    Python handles a signal when the compiled call or the compilation that is under way has ended.
    A second signal within the same call counts as the first: the run saves and stops after it.

    Attributes:
        requested: the number of the signal that arrived, or None. A program that stops because of
            it exits with `exit_status`, 128 + the signal's number: 130, 143 or 129.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_status(self) -> int:
        """128 + the signal's number; 0 without a signal."""
        return 0 if self.requested is None else 128 + self.requested

    def agreed(self) -> bool:
        """Whether to stop; all processes stop at the same step, whichever got the signal."""
        asked = [int(number) for number in exchanged(str(self.requested or "")) if number]
        if asked:  # otherwise a signal that arrives now would be forgotten
            self.requested = max(asked)
        return bool(asked)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # Python knows no handler that C code has set.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = number
        for either in self._previous:
            is_hangup = signal.Signals(either).name == "SIGHUP"
            signal.signal(either, signal.SIG_IGN if is_hangup else signal.SIG_DFL)
        line = (
            f"{signal.Signals(number).name}: stopping after the steps, validation or save in"
            " progress; a second signal ends at once\n"
        )
        # A handler may interrupt a print, and must not print itself.
        with contextlib.suppress(OSError, ValueError):  # nobody may read it
            if sys.__stdout__ is not None:  # else a file of the run may have its number
                os.write(sys.__stdout__.fileno(), line.encode())


def _signals() -> list[signal.Signals]:
    """The signals that ask to stop; Windows has no SIGHUP."""
    asking = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        asking.append(hangup)
    return asking
