"""Prints: the only place of the library that does. Progress of a run, in plain lines; warnings."""

import math
import os
import statistics
import sys
import time
import unicodedata

import numpy as np

from attention_jax.runs.processes import is_first

_SECONDS_BETWEEN_LINES = 10.0
_lost: list[OSError] = []  # the first error of standard output, which `say` leaves to the end


class Progress:
    """Prints the steps done, the speed, the time left and the mean loss, at most every 10 seconds.

    Args:
        description: what is being trained.
        start: steps done already.
        total: steps in all.
        seeds: how many train at once; the rate counts the steps of all of them.
        peak: steps per second of one seed if the devices computed at their peak; None if not known.
        began: `time.monotonic()` when the run began; None for now.
    """

    def __init__(
        self,
        description: str,
        *,
        start: int,
        total: int,
        seeds: int,
        peak: float | None = None,
        began: float | None = None,
    ):
        self._description, self._total, self._seeds = description, total, seeds
        self._peak, self._step = peak, start
        self._last_line = self._since = time.monotonic()
        self._began = self._since if began is None else began
        self._compiled: tuple[int, float] | None = None  # step and time after the first call
        self._done = np.zeros(3)  # steps, tokens and seconds of training of the calls after it
        self._diverged = 0  # seeds whose loss is not finite

    @property
    def speed(self) -> dict[str, float]:
        """The speed of all seeds together, without the first call, which compiles.

        Only training counts: from `begin`, or the `update` before, to `update`. It is {} until the
        second call has ended. Entries that are not known are left out.
        """
        if not self._done.any():
            return {}
        speed = {name: self._seeds * each for name, each in _speed(self._done).items()}
        if self._peak is not None:
            speed["flops_utilization"] = speed["steps_per_second"] / self._peak
        return speed

    @property
    def seconds(self) -> float:
        """Wall time so far, compilation included."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Notes that training goes on now, after a validation or the writing of a file."""
        self._since = time.monotonic()

    def update(
        self, step: int, losses: list[float], tokens: float | None = None
    ) -> dict[str, float]:
        """Notes that `step` is done.

        Args:
            step: steps done.
            losses: of each seed.
            tokens: of one seed since the last `update`, padding included; None if not known.

        Returns:
            steps and tokens per second of each seed since the last `update`; {} for the first call.
        """
        now, of_seed = time.monotonic(), dict[str, float]()
        tokens = math.nan if tokens is None else tokens
        call = np.array([step - self._step, tokens, now - self._since])
        self._step, self._since = step, now
        diverged = sum(not math.isfinite(loss) for loss in losses)
        if diverged > self._diverged:
            self._diverged = diverged
            self.note(
                f"warning: at step {step} the loss of {diverged} of {self._seeds} seeds is not"
                " finite; a smaller learning rate may help"
            )
        status = f"step {step}/{self._total}, loss {statistics.fmean(losses):.4f}"
        if self._compiled is None:
            self._compiled = (step, now)
        else:
            self._done += call
            of_seed, speed = _speed(call), self.speed
            rate = speed["steps_per_second"]
            status += f", {rate:.0f} steps/s" if rate >= 100 else f", {rate:.3g} steps/s"
            if "tokens_per_second" in speed:
                status += f", {speed['tokens_per_second']:,.0f} tokens/s"
            if "flops_utilization" in speed:
                status += f", {speed['flops_utilization']:.1%} of the devices' peak"
            first, began = self._compiled
            status += f", {(self._total - step) * (now - began) / (step - first):.0f} s left"
        if now - self._last_line > _SECONDS_BETWEEN_LINES or step == self._total:
            self._last_line = now
            self.note(status)
        return of_seed

    def note(self, text: str) -> None:
        """Prints a line of text."""
        say(f"{self._description}: {text}")


def _speed(done: np.ndarray) -> dict[str, float]:
    """Steps and tokens per second, where they are known, from [steps, tokens, seconds]."""
    rates = dict(zip(("steps_per_second", "tokens_per_second"), done[:2] / done[2], strict=True))
    return {name: float(rate) for name, rate in rates.items() if not math.isnan(rate)}


def say(text: str, *, error: bool = False) -> None:
    """Prints a line on standard output, or with `error` on standard error.

    With several processes, only the first prints on standard output. A line that cannot be printed
    is lost: a closed pipe or terminal, or a full disk behind it, does not end a run. Characters
    that the encoding of the stream lacks become "?".
    """
    if not error and not is_first():
        return
    stream = sys.stderr if error else sys.stdout
    if stream is None or getattr(stream, "closed", False):  # a user's stream may only write
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError as lost:
        if not error and not _lost:
            _lost.append(lost.with_traceback(None))


def end_of_output() -> OSError | None:
    """Ends standard output and standard error; the first error of standard output, if any."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as lost:
            if stream is sys.stdout:
                _lost.append(lost)
            # Otherwise Python tries again when it ends, and complains.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    first = next(iter(_lost), None)
    _lost.clear()
    return first


def warn(text: str) -> None:
    """Prints a warning on standard error."""
    say(f"warning: {text}", error=True)


def printable(text: str, keep: str = "\n\t") -> str:
    r"""A text with an escape sequence for each control character, except those in `keep`.

    >>> printable("a\x1b[2J\u00e9")
    'a\\x1b[2Jé'
    """

    def escaped(letter: str) -> str:
        is_control = unicodedata.category(letter) in ("Cc", "Cs") and letter not in keep
        return letter.encode("unicode_escape").decode() if is_control else letter

    return "".join(map(escaped, text))
