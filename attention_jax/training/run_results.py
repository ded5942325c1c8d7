"""The results of a finished run, kept in its folder so that they are computed once."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.runs.checkpoints import saved_steps
from attention_jax.runs.metrics_file import finite_or_null, read_lines
from attention_jax.runs.progress import warn
from attention_jax.runs.run_folder import JSON, read_config, write_json
from attention_jax.training.metrics import mean_and_deviation
from attention_jax.training.run import load_run
from attention_jax.training.settings import task_in
from attention_jax.training.task import Result, Task


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that was trained to its end.

    Attributes:
        workdir: its folder.
        task: its task, with all settings.
        step: its last step.
        results: its results by name.
        seconds: wall time of training, of all its sessions together, compilation included.
        environment: versions, device and commit of its first session.
    """

    workdir: Path
    task: Task
    step: int
    results: dict[str, Result]
    seconds: float
    environment: JSON


def finished_run(workdir: Path, lengths: Sequence[int] = ()) -> FinishedRun:
    """The run in a folder with its results, read from results.json or computed and written there.

    Args:
        workdir: the run's folder.
        lengths: also the results at these lengths.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or its run cannot be loaded, or is
            not finished; or the task has no results by length.
    """
    task = task_in(workdir)
    check_lengths(task, lengths)
    path = workdir / "results.json"
    step = max(saved_steps(workdir / "checkpoints"), default=0)
    program = read_config(workdir).get("program")
    kept_for = {"program": program, "step": step, "steps": task.train.steps}
    content = _read(path)
    if kept_for != {name: content.get(name) for name in kept_for}:
        content = {}
    # By length; the key "" has the results of the task without a length.
    results = content.get("results", {})
    missing = [length for length in ("", *map(str, lengths)) if length not in results]
    if missing:
        run = load_run(workdir)
        step = run.step  # an earlier one, if the newest is damaged
        if "" in missing and step < task.train.steps:
            raise ValueError(
                f"workdir {workdir} is not finished: step {step} of {task.train.steps}"
            )
        for length in missing:
            found = task.evaluate(run.params, [int(length)] if length else (), folder=workdir)
            if not length:
                found = {**found, "training loss": _training_loss(workdir, step)}
            results[length] = {name: _to_json(result) for name, result in found.items()}
        try:
            write_json(path, {**kept_for, "step": step, "results": results})
        except OSError as error:
            warn(f"{path} cannot be written: {error.strerror or error}")
    by_name = {k: v for length in ("", *map(str, lengths)) for k, v in results[length].items()}
    seconds = [line["seconds"] for line in read_lines(workdir / "timing.jsonl")]
    return FinishedRun(
        workdir=workdir,
        task=task,
        step=step,
        results={name: _from_json(result) for name, result in by_name.items()},
        seconds=sum(seconds) if seconds else math.nan,
        environment=_read(workdir / "env.json"),
    )


def _training_loss(workdir: Path, step: int) -> Result:
    """Each seed's mean loss over the last `log_every` steps before a step, from metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    losses = [line["loss"] for line in read_lines(path) if line["step"] == step]
    if not losses:
        raise ValueError(f"{path} has no line of step {step}")
    return Result(losses[-1], larger_is_better=False)


class Summary(NamedTuple):
    """A result over seeds."""

    mean: float
    deviation: float  # sample standard deviation; 0 for a single seed
    worst: float  # NaN if a seed diverged


def summary_of(result: Result) -> Summary:
    """Mean, deviation and the worst seed."""
    values = np.asarray(result.by_seed, np.float64)
    mean, deviation = mean_and_deviation(values)
    worst = values.min() if result.larger_is_better else values.max()  # NaN is both
    return Summary(float(mean), float(deviation), float(worst))


def check_lengths(task: Task | type[Task], lengths: Sequence[int]) -> None:
    """Raises ValueError unless the task has results at these lengths."""
    given = " ".join(map(str, lengths))
    if lengths and not task.by_length:
        raise ValueError(
            f"lengths must be left out: {task.name} has no results by length; got {given}"
        )
    if min(lengths, default=1) < 1:
        raise ValueError(f"lengths must be at least 1; got {given}")


def _to_json(result: Result) -> JSON:
    return {**result._asdict(), "by_seed": [*map(finite_or_null, result.by_seed)]}


def _from_json(stored: JSON) -> Result:
    by_seed = np.array(stored["by_seed"], float)  # None becomes NaN
    return Result(**{**stored, "by_seed": by_seed.tolist()})


def _read(path: Path) -> JSON:
    """A JSON object; {} if there is none that can be read: results are then computed again."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
