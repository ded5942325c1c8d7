"""The results of a finished run, kept in its folder so that they are computed once."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.progress import warn
from attention_jax.runs.run_folder import JSON, RunFolder, write_json
from attention_jax.training.run import TrainedRun, load_run
from attention_jax.training.task_definition import Config, Result, Results, TaskDefinition


@dataclasses.dataclass(frozen=True)
class FinishedRun(Generic[Config]):
    """A run that was trained to its end.

    Attributes:
        workdir: its folder.
        config: its settings.
        step: its last step.
        results: its results by name.
        seconds: wall time of training, of all its sessions together, compilation included.
        environment: versions, device and commit of its first session.
    """

    workdir: Path
    config: Config
    step: int
    results: Results
    seconds: float
    environment: JSON


def finished_run(
    definition: TaskDefinition[Config], workdir: Path, lengths: Sequence[int] = ()
) -> FinishedRun[Config]:
    """The run in a folder with its results, read from results.json or computed and written there.

    Args:
        definition: the task.
        workdir: the run's folder.
        lengths: also the results at these lengths of the source.

    Raises:
        ValueError: the folder holds no run of this task, or its run cannot be loaded, or is not
            finished; or the task has no results by length.
    """
    check_lengths(definition, lengths)
    config = definition.config_from(workdir)
    folder, path = RunFolder(workdir), Path(workdir) / "results.json"
    step = _newest_step(folder)
    content = _read(path)
    # Of the settings of a run only the number of steps may change.
    kept_for = {"task": definition.name, "step": step, "steps": config.loop.steps}
    if kept_for != {name: content.get(name) for name in kept_for}:
        trained = load_run(definition, workdir)
        if trained.step < config.loop.steps and not definition.stopped_early(trained):
            raise ValueError(
                f"workdir {workdir} is not finished: step {trained.step} of {config.loop.steps}"
            )
        results = _to_json(definition.results(trained))
        content = {**kept_for, "step": trained.step, "results": results}
        content["by_length"] = _by_length(definition, trained, lengths)
        _write(path, content)
    missing = [length for length in lengths if str(length) not in content["by_length"]]
    if missing:
        trained = load_run(definition, workdir)
        content["by_length"] |= _by_length(definition, trained, missing)
        _write(path, content)
    stored = {**content["results"]}
    for length in lengths:
        stored |= content["by_length"][str(length)]
    seconds = [line["seconds"] for line in read_lines(folder.path / "timing.jsonl")]
    return FinishedRun(
        workdir=folder.path,
        config=config,
        step=content["step"],
        results={name: _from_json(result) for name, result in stored.items()},
        seconds=sum(seconds) if seconds else math.nan,
        environment=_read(folder.path / "env.json"),
    )


def check_lengths(definition: TaskDefinition[Any], lengths: Sequence[int]) -> None:
    """Raises ValueError unless the task has results at these lengths."""
    if lengths and definition.length_results is None:
        raise ValueError(
            f"lengths must be left out: {definition.name} has no results by length; got"
            f" {' '.join(map(str, lengths))}"
        )
    if min(lengths, default=1) < 1:
        raise ValueError(f"lengths must be at least 1; got {' '.join(map(str, lengths))}")


def training_loss(run: TrainedRun[Any]) -> Result:
    """The last line of metrics.jsonl: each seed's mean loss over the last `log_every` steps."""
    assert run.workdir is not None
    path = RunFolder(run.workdir).metrics
    losses = [line["loss"] for line in read_lines(path) if line["step"] == run.step]
    if not losses:
        raise ValueError(f"{path} has no line of step {run.step}")
    return Result(losses[-1], larger_is_better=False)


def _newest_step(folder: RunFolder) -> int | None:
    if not folder.checkpoints.is_dir():
        return None  # `load_run` reports it
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        return checkpoints.latest_step()


def _by_length(
    definition: TaskDefinition[Config], run: TrainedRun[Config], lengths: Sequence[int]
) -> JSON:
    if definition.length_results is None:
        return {}
    return {str(length): _to_json(definition.length_results(run, [length])) for length in lengths}


def _read(path: Path) -> JSON:
    """A JSON object; {} if there is none that can be read: results are then computed again."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: JSON) -> None:
    try:
        write_json(path, content)
    except OSError as error:
        warn(f"{path} cannot be written: {error.strerror or error}")


def _to_json(results: Results) -> JSON:
    """Each result as an object; null for a number that is not finite."""
    return {
        name: {
            **result._asdict(),
            "by_seed": [value if math.isfinite(value) else None for value in result.by_seed],
        }
        for name, result in results.items()
    }


def _from_json(content: JSON) -> Result:
    by_seed = [math.nan if value is None else value for value in content["by_seed"]]
    return Result(**{**content, "by_seed": by_seed})
