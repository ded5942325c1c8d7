"""Validation: metrics computed at each checkpoint, without changing the training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_jax.runs import processes
from attention_jax.runs.metrics_file import MetricsFile
from attention_jax.training.task import JSON, Task, Validation


class ValidationLog:
    """Measures `Task.validate` and remembers the metric of each checkpoint.

    Args:
        task: a task with a `validation`.
        folder: of the run.
        file: where lines go; None on processes that write nothing.
        earlier: the lines written before the run was resumed.
    """

    def __init__(self, task: Task, folder: Path, file: MetricsFile | None, earlier: list[JSON]):
        assert task.validation is not None
        self.file = file
        self._task, self._folder, self._rule = task, folder, task.validation
        self._losses = [_loss(self._rule, line) for line in earlier]

    def validate(self, step: int, params: Any, note: Callable[[str], None]) -> float:
        """Measures, writes a line and notes it; returns a loss: smaller is better."""
        line = self._task.validate(params, self._folder)
        write_line(self.file, step, line)
        self._losses.append(_loss(self._rule, line))
        means = ", ".join(f"{name} {statistics.fmean(x):.4g}" for name, x in line.items())
        note(f"step {step}, validation: {means}")
        return self._losses[-1]

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out since the best checkpoint."""
        patience = self._rule.patience
        if patience is None or not self._losses:
            return False
        return len(self._losses) - 1 - self._losses.index(min(self._losses)) >= patience


def write_line(file: MetricsFile | None, step: int, line: dict[str, list[float]]) -> None:
    """Writes a line on the process that has the file; all processes raise its error."""
    with processes.together():
        if file is not None:
            file.write(step, line)


def stopped_early(task: Task, lines: list[JSON]) -> bool:
    """Whether a run with these lines of validation.jsonl ended because its patience ran out."""
    return task.validation is not None and ValidationLog(task, Path(), None, lines).exhausted


def _loss(rule: Validation, line: Any) -> float:
    mean = statistics.fmean(line[rule.metric])
    if not math.isfinite(mean):
        return math.inf  # never the best; a line read back has NaN here, with the same result
    return -mean if rule.larger_is_better else mean
