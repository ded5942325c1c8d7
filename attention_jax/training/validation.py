"""What is measured at each checkpoint, beside the training that it does not change."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_jax.runs import processes
from attention_jax.runs.run_folder import JSON, MetricsFile

Line = dict[str, list[float]]


class ValidationPlan(NamedTuple):
    """What to measure, and what follows from it."""

    measure: Callable[[Any], Line]  # params stacked over seeds -> {name: a number a seed}
    metric: str  # which of them says how good a checkpoint is, by its mean over seeds
    larger_is_better: bool
    patience: int | None  # checkpoints without a better one after which to stop; None never


class Validation:
    """The plan at work.

    Args:
        plan: what to measure.
        file: where lines go; None on processes that write nothing.
        earlier: the lines of the checkpoints before, of a run that goes on.
    """

    def __init__(self, plan: ValidationPlan, file: MetricsFile | None, earlier: list[JSON]):
        self.file = file
        self._plan = plan
        self._losses = [self._loss(line) for line in earlier]

    def at(self, step: int, params: Any, tell: Callable[[str], None]) -> float:
        """Measures, writes and tells; how good the parameters are: the smaller, the better."""
        line = self._plan.measure(params)
        with processes.together():
            if self.file is not None:
                self.file.write(step, line)
        self._losses.append(self._loss(line))
        means = ", ".join(f"{name} {statistics.fmean(x):.4g}" for name, x in line.items())
        tell(f"step {step}, validation: {means}")
        return self._losses[-1]

    @property
    def exhausted(self) -> bool:
        """Whether the best is too long ago."""
        if self._plan.patience is None or not self._losses:
            return False
        since = len(self._losses) - 1 - self._losses.index(min(self._losses))
        return since >= self._plan.patience

    def _loss(self, line: Any) -> float:
        mean = statistics.fmean(line[self._plan.metric])
        if not math.isfinite(mean):
            return math.inf  # no better than any, and the same when it is read back as null
        return -mean if self._plan.larger_is_better else mean
