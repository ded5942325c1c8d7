"""The results of trained runs, computed by the task as it is now."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.runs.metrics_file import last_line, read_lines
from attention_jax.runs.run_folder import JSON, read_json
from attention_jax.training.metrics import mean_and_deviation, mean_interval
from attention_jax.training.run import TrainedRun, load_run
from attention_jax.training.task import Result, Task


@dataclasses.dataclass(frozen=True)
class EvaluatedRun:
    """A run, and the results of its newest checkpoint.

    Attributes:
        workdir: its folder.
        task: its task, with all settings.
        step: the step of the checkpoint.
        results: its results by name.
        seconds: wall time of `run`, of all its starts together.
        environment: versions, device and commit of its first session.
    """

    workdir: Path
    task: Task
    step: int
    results: dict[str, Result]
    seconds: float
    environment: JSON

    @property
    def is_finished(self) -> bool:
        """Whether it was trained to its last step."""
        return self.step >= self.task.train.steps


def evaluated_run(workdir: Path, lengths: Sequence[int] = ()) -> EvaluatedRun:
    """The run in a folder with its results, those of training included, finished or not.

    Args:
        workdir: the run's folder.
        lengths: also the results at these lengths.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or its run cannot be loaded; or
            the task has no results by length.
    """
    run = load_run(workdir)
    results = results_of(run, lengths)
    return EvaluatedRun(
        workdir=workdir,
        task=run.task,
        step=run.step,
        results={**results, "training loss": _training_loss(workdir, run.step)},
        seconds=seconds_of(workdir) or math.nan,
        environment=read_json(workdir / "env.json"),
    )


def seconds_of(workdir: Path) -> float:
    """The wall time of a run, of all starts that were neither killed nor ended with an error."""
    return sum(float(line.get("seconds", 0)) for line in read_lines(workdir / "timing.jsonl"))


def results_of(run: TrainedRun, lengths: Sequence[int] = ()) -> dict[str, Result]:
    """The results of a run by name, at `lengths` too.

    Raises:
        ValueError: the task has no results by length, or returns something else than results.
    """
    task = run.task
    check_lengths(task, lengths)
    results: dict[str, Result] = {}
    for each in ((), tuple(lengths)) if lengths else ((),):
        found = task.evaluate(run.params, each, folder=run.workdir)
        values = found.values() if isinstance(found, dict) else [None]
        if not all(
            isinstance(value, Result) and np.shape(value.by_seed) == (task.train.seeds,)
            for value in values
        ):
            raise ValueError(
                f"task {task.name}: evaluate(params, lengths) must return a dict of Result, each"
                f" with {task.train.seeds} numbers, one for each seed; got {found!r}"
            )
        for name, result in found.items():
            by_seed = np.asarray(result.by_seed, np.float64).tolist()  # for JSON
            results[name] = result._replace(by_seed=by_seed)
    return results


def _training_loss(workdir: Path, step: int) -> Result:
    """Each seed's mean loss over the last `log_every` steps before a step, from metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    line = last_line(path, step)
    if line.get("step") != step:
        raise ValueError(f"{path} has no line of step {step}")
    return Result(line["loss"], larger_is_better=False)


class Summary(NamedTuple):
    """A result over seeds."""

    mean: float
    deviation: float  # sample standard deviation; NaN for a single seed, which has none
    low: float  # the 95 % interval of the mean, `mean_interval`; NaN for a single seed
    high: float
    worst: float  # NaN if a seed diverged


def summary_of(result: Result) -> Summary:
    """Mean, deviation, interval and the worst seed."""
    values = np.asarray(result.by_seed, np.float64)
    mean, deviation = mean_and_deviation(values)
    low, high = mean_interval(values, result.low, np.inf if result.high is None else result.high)
    worst = values.min() if result.larger_is_better else values.max()  # NaN is both
    return Summary(float(mean), float(deviation), low, high, float(worst))


SUMMARY = "mean [95 % interval over seeds] (worst seed)"  # what `summary_text` shows


def summary_text(result: Result, form: str) -> str:
    """Returns "mean [low, high] (worst)" in a format such as ".4g", or the number of one seed.

    If a number is not finite, the text says how many seeds diverged.

    >>> summary_text(Result([0.5, 0.25], True), ".2f"), summary_text(Result([0.5], True), ".2f")
    ('0.38 [0.00, 1.96] (0.25)', '0.50')
    >>> summary_text(Result([0.5, math.nan], True), ".2f")
    '1 of 2 diverged'
    """
    seeds, finite = len(result.by_seed), int(np.isfinite(result.by_seed).sum())
    if finite < seeds:
        return f"{seeds - finite} of {seeds} diverged"
    mean, _, low, high, worst = (f"{number:{form}}" for number in summary_of(result))
    return mean if seeds == 1 else f"{mean} [{low}, {high}] ({worst})"


def check_lengths(task: Task | type[Task], lengths: Sequence[int]) -> None:
    """Raises ValueError unless the task has results at these lengths."""
    given = " ".join(map(str, lengths))
    if lengths and not task.by_length:
        raise ValueError(
            f"lengths must be left out: {task.name} has no results by length; got {given}"
        )
    if min(lengths, default=1) < 1:
        raise ValueError(f"lengths must be at least 1; got {given}")
