"""A training run in its folder: train it, resume it, load it; the same functions for every task."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple

import jax
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints, Restored, StepName
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import MetricsFile, read_lines, require_tensorboard
from attention_jax.runs.progress import Progress, warn
from attention_jax.runs.run_folder import JSON, RunFolder
from attention_jax.training.gradient_log import GradientLog, check_log_gradients
from attention_jax.training.loop import (
    Params,
    Records,
    Training,
    TrainState,
    initial_state,
    trace_step,
    train,
)
from attention_jax.training.resuming import resumable_settings
from attention_jax.training.sharding import Layout, MeshShape, whole_machine
from attention_jax.training.task_definition import Config, RunData, TaskDefinition
from attention_jax.training.validation import Validation


@dataclasses.dataclass(frozen=True)
class TrainedRun(Generic[Config]):
    """A run that was trained or loaded.

    Attributes:
        config: its settings.
        params: stacked over seeds.
        step: how far it was trained.
        workdir: its folder, if it has one.
        averaged: the steps whose mean the parameters are; only `step` unless an average was asked
            for.
        seconds: wall time of this call of `train_run`, compilation included.
        steps_per_second: of all seeds together, compilation excluded.
        interrupted: 130 or 143, the exit status, if a signal asked to stop; else 0.
        exhausted: whether training stopped because validation no longer improved.
    """

    config: Config
    params: Params
    step: int
    workdir: Path | None = None
    averaged: tuple[int, ...] = ()
    seconds: float | None = None
    steps_per_second: float | None = None
    interrupted: int = 0
    exhausted: bool = False


def train_run(
    definition: TaskDefinition[Config],
    config: Config,
    workdir: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    interruption: Interruption | None = None,
) -> TrainedRun[Config]:
    """Trains in a folder, from its newest good checkpoint or from the start.

    Args:
        definition: the task.
        config: all settings.
        workdir: the folder.
        resume: continue the run that is there. `config` must be that of the run, except for
            `loop.steps` where the learning rate does not depend on it: a finished run goes on, and
            ends bit-identical to a run of so many steps if it had ended at a multiple of
            `log_every` (with validation, of `checkpoint_every`).
        tensorboard: also write TensorBoard events.
        log_gradients: log gradient statistics to gradients.jsonl every so many steps.
        mesh: over which devices; None for one device, or for all devices in a run of many
            processes. A run may be resumed on another mesh.
        interruption: a caller's watch for signals, one for several runs; None to watch during this
            run.

    Raises:
        ValueError: a setting, the data or the folder does not fit, and nothing has been changed; or
            all checkpoints are damaged; or a file cannot be written.
    """
    start = _checked_start(definition, config, workdir, tensorboard, log_gradients, mesh)
    folder, data, layout, loop = RunFolder(workdir), start.data, Layout(start.mesh), config.loop
    processes.check_same(json.dumps([start.settings, start.mesh.to_words()], sort_keys=True))
    training = Training(data.task, definition.optimizer(config), loop, layout)
    with contextlib.ExitStack() as stack:
        interruption = interruption or stack.enter_context(Interruption())
        with processes.together():
            if processes.is_first():
                stack.enter_context(
                    folder.begun(
                        start.settings, resume=resume, completed=start.completed, files=data.files
                    )
                )
        checkpoints = stack.enter_context(
            Checkpoints(folder.checkpoints, keep=loop.keep, keep_best=loop.keep_best)
        )
        state, first = _first_state(training, checkpoints)
        files = _open_files(folder, first, data, tensorboard, log_gradients is not None, stack)
        progress = stack.enter_context(
            Progress(
                config.label,
                start=first,
                total=loop.steps,
                seeds=loop.seeds,
                shown=processes.is_first(),
            )
        )
        if data.description:
            progress.note(data.description)
        gradient_log = validation = None
        if log_gradients is not None:
            assert definition.gradient_statistics is not None
            statistics = definition.gradient_statistics
            gradient_log = GradientLog(log_gradients, statistics, files.gradients)
        if data.validation is not None:
            earlier = [line for line in read_lines(folder.validation) if line["step"] <= first]
            validation = Validation(data.validation, files.validation, earlier)
        records = Records(checkpoints, progress, files.metrics, gradient_log, validation)
        state = train(training, state, records, interruption)
        step = int(layout.to_host(state.step)[0])
        seconds, rate = progress.seconds, progress.rate
        if step > first and processes.is_first():
            speed = {"seconds": seconds, "steps_per_second": rate}
            folder.add_timing({"from_step": first, "to_step": step, **speed})
    exhausted = step < loop.steps and validation is not None and validation.exhausted
    return TrainedRun(
        config,
        state.params,
        step,
        folder.path,
        (step,),
        seconds=seconds,
        steps_per_second=rate,
        interrupted=interruption.exit_status,
        exhausted=exhausted,
    )


def check_run(
    definition: TaskDefinition[Config],
    config: Config,
    workdir: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
) -> None:
    """Raises the errors with which `train_run` would not begin; changes nothing.

    The first step is traced too, which raises the errors of a model, a score or a loss.
    """
    start = _checked_start(definition, config, workdir, tensorboard, log_gradients, mesh)
    RunFolder(workdir).check(start.settings, resume=resume, completed=start.completed)
    trace_step(start.data.task, definition.optimizer(config), config.loop)


def load_run(
    definition: TaskDefinition[Config],
    workdir: Path,
    step: StepName = "newest",
    *,
    average: int = 1,
) -> TrainedRun[Config]:
    """A state of a run; nothing in its folder is changed.

    Args:
        definition: the task.
        workdir: the run's folder.
        step: "newest" for the newest good checkpoint; "best" for the kept checkpoint with the best
            validation metric, or without validation the smallest loss; or a step that is kept.
        average: parameters are the mean of those of so many of the newest checkpoints.

    Raises:
        ValueError: the folder holds no run of this task, or no such checkpoint, or too few to
            average; or the checkpoint is damaged.
    """
    check_integer("average", average)
    config = definition.config_from(workdir)
    like = jax.eval_shape(functools.partial(definition.initial_state, config))
    with _kept_checkpoints(workdir) as checkpoints:
        kept = checkpoints.steps()
        wanted: list[int | None]
        if average == 1:
            wanted = [checkpoints.step_called(step)]
        elif step != "newest":
            raise ValueError(f"average must be 1 with step {step}; got {average}")
        elif average > len(kept):
            raise ValueError(f"average must be at most {len(kept)}, the checkpoints; got {average}")
        else:
            wanted = list(kept[-average:])
        restored = [_restored(checkpoints, like, each) for each in wanted]
    params = restored[-1].state.params
    if average > 1:
        by_step = [each.state.params for each in restored]
        params = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *by_step)
    steps = tuple(each.step for each in restored)
    return TrainedRun(config, params, steps[-1], Path(workdir), steps)


def load_states(
    definition: TaskDefinition[Config], workdir: Path
) -> tuple[Config, dict[int, Callable[[], TrainState]]]:
    """A run's settings, and for each available step a function that loads its state.

    The state of step 0 is computed from the seeds; the others are the checkpoints that are kept.

    Raises:
        ValueError: the folder holds no run of this task, or no checkpoint yet. The functions raise
            it for a damaged state.
    """
    config = definition.config_from(workdir)
    start = functools.partial(definition.initial_state, config)
    with _kept_checkpoints(workdir) as checkpoints:
        kept = checkpoints.steps()

    def load(step: int) -> TrainState:
        with _kept_checkpoints(workdir) as checkpoints:
            state: TrainState = _restored(checkpoints, jax.eval_shape(start), step).state
        return state

    return config, {0: start, **{step: functools.partial(load, step) for step in kept}}


class _Start(NamedTuple):
    """What a run begins with."""

    data: RunData
    settings: JSON  # for config.json
    completed: Callable[[JSON], JSON]  # adds defaults to stored settings that are older
    mesh: MeshShape


def _checked_start(
    definition: TaskDefinition[Config],
    config: Config,
    workdir: Path,
    tensorboard: bool,
    log_gradients: int | None,
    mesh: MeshShape | None,
) -> _Start:
    if tensorboard:
        require_tensorboard()
    if log_gradients is not None:
        check_log_gradients(log_gradients, config.loop.log_every)
    mesh = mesh or whole_machine()
    mesh.check(seeds=config.loop.seeds, batch_size=definition.batch_size(config))
    if definition.prepare is None:
        data = RunData(definition.task(config))
    else:
        data = definition.prepare(config, RunFolder(workdir).path, mesh.data * mesh.fsdp)
    settings = {**config.to_json(), **(data.digests or {})}
    folder = RunFolder(workdir)
    completed = functools.partial(resumable_settings, definition, settings, folder=folder)
    return _Start(data, settings, completed, mesh)


class _Files(NamedTuple):
    """Open files; None for those that are not written, and on all processes except the first."""

    metrics: MetricsFile | None = None
    gradients: MetricsFile | None = None
    validation: MetricsFile | None = None


def _first_state(training: Training, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The newest good state and its step, or the initial state; damaged checkpoints are moved."""
    task, optimizer, loop, layout = training
    assert layout is not None
    start = functools.partial(initial_state, task, optimizer, loop, layout)
    restored = checkpoints.restore(layout.placed(jax.eval_shape(start)))
    if restored is None:
        return start(), 0
    if restored.damaged:
        _warn_of_damage(restored, moved_to=checkpoints.set_aside(restored.damaged))
    return restored.state, restored.step


def _open_files(
    folder: RunFolder,
    first: int,
    data: RunData,
    tensorboard: bool,
    gradients: bool,
    stack: contextlib.ExitStack,
) -> _Files:
    """Opens the files of a run that starts at step `first`, without the lines after that step."""
    events = folder.path / "tensorboard" if tensorboard else None

    def opened(path: Path, after_step: int, subfolder: str = "") -> MetricsFile:
        tensorboard = None if events is None else events / subfolder
        return stack.enter_context(
            MetricsFile(path, after_step=after_step, tensorboard=tensorboard)
        )

    files = _Files()
    with processes.together():
        if processes.is_first():
            metrics = opened(folder.metrics, first)
            if metrics.last_step < first:
                warn(
                    f"{folder.metrics} ends at step {metrics.last_step}, before the checkpoint of"
                    f" step {first}: the lines between are lost"
                )
            files = _Files(
                metrics,
                # A run that begins anew writes the line of step 0 again.
                opened(folder.gradients, first or -1, "gradients") if gradients else None,
                None if data.validation is None else opened(folder.validation, first, "validation"),
            )
    return files


def _kept_checkpoints(workdir: Path) -> Checkpoints:
    """A run's checkpoints, read-only; raises ValueError if there are none."""
    folder = RunFolder(workdir).checkpoints
    if folder.is_dir():
        checkpoints = Checkpoints(folder, read_only=True)
        if checkpoints.steps():
            return checkpoints
        checkpoints.close()
    raise ValueError(f"workdir {workdir} has no checkpoint yet; train it first")


def _restored(checkpoints: Checkpoints, like: Any, step: int | None) -> Restored:
    restored = checkpoints.restore(like, step=step)
    assert restored is not None  # there are checkpoints
    _warn_of_damage(restored)
    return restored


def _warn_of_damage(restored: Restored, *, moved_to: Path | None = None) -> None:
    """Warns of the damaged checkpoints that were skipped."""
    for step, reason in restored.damaged.items():
        moved = "" if moved_to is None else f" and was moved to {moved_to}"
        warn(
            f"the checkpoint of step {step} is damaged ({reason}){moved};"
            f" that of step {restored.step} is used"
        )
