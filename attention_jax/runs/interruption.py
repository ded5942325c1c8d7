"""Ctrl-C, SIGTERM and a hang-up ask to stop after the current call, without losing anything."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Self

from attention_jax.runs.processes import exchanged

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # of the signals that ask to stop; Windows has no SIGHUP


class Interruption:
    """While entered, the first signal sets `exit_status`; a second one ends the process.

    The signals are SIGINT, SIGTERM and, when the terminal closes, SIGHUP. A second SIGHUP is
    ignored, because a shell repeats that of the terminal; under `nohup` every SIGHUP is ignored.
    Outside of the main thread, where Python handles no signals, nothing changes.

    Python handles a signal when the compiled call or the compilation that is under way has ended.
    A second signal within the same call counts as the first: the run saves and stops after it.

    Attributes:
        exit_status: of a program that stops because of a signal, 128 + its number: 130, 143 or 129;
            0 without a signal.
    """

    def __init__(self) -> None:
        self.exit_status = 0
        self._previous: dict[signal.Signals, object] = {}

    def agreed(self) -> bool:
        """Whether to stop; all processes stop at the same step, whichever got the signal."""
        asked = [int(status) for status in exchanged(str(self.exit_status or "")) if status]
        if asked:  # otherwise a signal that arrives now would be forgotten
            self.exit_status = max(asked)
        return bool(asked)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            asking = [each for each in signal.Signals if each.name in _NAMES]
            for each in asking:
                if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN:
                    self._previous[each] = signal.signal(each, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # Python knows no handler that C code has set.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.exit_status = 128 + number
        for each in self._previous:
            signal.signal(each, signal.SIG_IGN if each.name == "SIGHUP" else signal.SIG_DFL)
        line = (
            f"{signal.Signals(number).name}: stopping after the steps, validation or save in"
            " progress; a second signal ends at once\n"
        )
        # A handler may interrupt a print, and must not print itself.
        with contextlib.suppress(OSError, ValueError):  # nobody may read it
            if sys.__stdout__ is not None:  # else a file of the run may have its number
                os.write(sys.__stdout__.fileno(), line.encode())
