"""Validation: metrics computed at each checkpoint, without changing the training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_jax.runs import processes
from attention_jax.runs.metrics_file import MetricsFile
from attention_jax.runs.run_folder import JSON

Line = dict[str, list[float]]


class ValidationPlan(NamedTuple):
    """The metrics, and the one among them that chooses checkpoints."""

    measure: Callable[[Any], Line]  # params stacked over seeds -> {name: one number per seed}
    metric: str  # its mean over seeds ranks checkpoints
    larger_is_better: bool
    patience: int | None  # stop after so many checkpoints without a better metric; None never


class Validation:
    """Carries out a plan, and remembers the metric of each checkpoint.

    Args:
        plan: what to measure.
        file: where lines go; None on processes that write nothing.
        earlier: the lines written before the run was resumed.
    """

    def __init__(self, plan: ValidationPlan, file: MetricsFile | None, earlier: list[JSON]):
        self.file = file
        self._plan = plan
        self._losses = [self._loss(line) for line in earlier]

    def validate(self, step: int, params: Any, note: Callable[[str], None]) -> float:
        """Measures, writes a line and notes it; returns a loss: smaller is better."""
        line = self._plan.measure(params)
        with processes.together():
            if self.file is not None:
                self.file.write(step, line)
        self._losses.append(self._loss(line))
        means = ", ".join(f"{name} {statistics.fmean(x):.4g}" for name, x in line.items())
        note(f"step {step}, validation: {means}")
        return self._losses[-1]

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out since the best checkpoint."""
        if self._plan.patience is None or not self._losses:
            return False
        since = len(self._losses) - 1 - self._losses.index(min(self._losses))
        return since >= self._plan.patience

    def _loss(self, line: Any) -> float:
        mean = statistics.fmean(line[self._plan.metric])
        if not math.isfinite(mean):
            return math.inf  # never the best; a line read back has NaN here, with the same result
        return -mean if self._plan.larger_is_better else mean
