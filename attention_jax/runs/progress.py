"""Progress of a run: a bar on a terminal, plain lines elsewhere; and warnings."""

from __future__ import annotations

import math
import statistics
import sys
import time

import rich.console
import rich.progress

from attention_jax.runs import processes

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows the steps done, the rate, the time left and the mean loss.

    Args:
        description: what is being trained.
        start: steps done already.
        total: steps in all.
        seeds: how many train at once; the rate counts the steps of all of them.
        shown: False to measure time and rate, and show nothing.
    """

    def __init__(self, description: str, *, start: int, total: int, seeds: int, shown: bool = True):
        self._description, self._total, self._seeds, self._shown = description, total, seeds, shown
        self._began = self._last_line = time.monotonic()
        self._warm: tuple[int, float] | None = None  # after the first call, which compiles
        self._now = (start, self._began)
        self._diverged = 0  # seeds whose loss is not finite
        console = rich.console.Console()
        self._on_terminal = shown and console.is_terminal
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            "{task.fields[status]}",
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not self._on_terminal,
        )
        self._task = self._bar.add_task(
            description, completed=start, total=total, status="compiling"
        )

    @property
    def rate(self) -> float | None:
        """Steps per second of all seeds together, without the first call, which compiles.

        None until the second call is done.
        """
        if self._warm is None or self._now == self._warm:
            return None
        (first, began), (last, ended) = self._warm, self._now
        return (last - first) * self._seeds / (ended - began)

    @property
    def seconds(self) -> float:
        """Wall time so far, compilation included."""
        return time.monotonic() - self._began

    def update(self, step: int, metrics: dict[str, list[float]]) -> None:
        """Shows that `step` is done, with its line of metrics."""
        self._now = (step, time.monotonic())
        diverged = sum(not math.isfinite(loss) for loss in metrics["loss"])
        if diverged > self._diverged:
            self._diverged = diverged
            self.note(
                f"warning: at step {step} the loss of {diverged} of {self._seeds} seeds is not"
                " finite; a smaller learning rate may help"
            )
        status = f"loss {statistics.fmean(metrics['loss']):.4f}"
        rate, left = self.rate, ""
        if rate is None:
            self._warm = self._now
        else:
            status += f", {rate:.0f} steps/s" if rate >= 100 else f", {rate:.3g} steps/s"
            left = f", {(self._total - step) * self._seeds / rate:.0f} s left"
        self._bar.update(self._task, completed=step, status=status)
        seconds = self._now[1] - self._last_line
        if not self._on_terminal and (seconds > _SECONDS_BETWEEN_LINES or step == self._total):
            self._last_line = self._now[1]
            self.note(f"step {step}/{self._total}, {status}{left}")

    def note(self, text: str) -> None:
        """Shows a line of text."""
        line = f"{self._description}: {text}"
        if self._on_terminal:
            self._bar.console.print(line, highlight=False, markup=False, emoji=False)
        elif self._shown:
            print(line, flush=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def warn(text: str) -> None:
    """Prints a warning on standard error, from the first process only."""
    if processes.is_first():
        print(f"warning: {text}", file=sys.stderr)
