"""A training run in its folder: train it, resume it, load it; the same functions for every task."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.core.programs import is_of_this_package
from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints, Restored, StepName
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import MetricsFile, read_lines, require_tensorboard
from attention_jax.runs.progress import Progress, warn
from attention_jax.runs.run_folder import JSON, RunFolder
from attention_jax.training.loop import (
    Records,
    TrainState,
    initial_state,
    trace_step,
    train,
)
from attention_jax.training.settings import resumable_settings, settings_of, task_in
from attention_jax.training.sharding import Layout, MeshShape, whole_machine
from attention_jax.training.task import Feed, Params, Task
from attention_jax.training.validation import ValidationLog


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that was trained or loaded.

    Attributes:
        task: the task, with all settings.
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

    task: Any  # a `Task`
    params: Params
    step: int
    workdir: Path | None = None
    averaged: tuple[int, ...] = ()
    seconds: float | None = None
    steps_per_second: float | None = None
    interrupted: int = 0
    exhausted: bool = False

    def params_of(self, seed_index: int) -> Params:
        """The parameters of one seed; ValueError if there is no such seed."""
        seeds = self.task.train.seeds
        if not 0 <= seed_index < seeds:
            raise ValueError(f"seed_index must be from 0 to {seeds - 1}; got {seed_index}")
        return jax.tree.map(lambda leaf: leaf[seed_index], self.params)


def train_run(
    task: Task,
    workdir: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    interruption: Interruption | None = None,
) -> TrainedRun:
    """Trains in a folder, from its newest good checkpoint or from the start.

    Args:
        task: what is learned, with all settings.
        workdir: the folder.
        resume: continue the run that is there. The settings must be those of the run, except for
            `train.steps` where the learning rate does not depend on it: a finished run goes on, and
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
    mesh = mesh or whole_machine()
    feed, settings = _checked_start(task, workdir, tensorboard, log_gradients, mesh)
    folder, layout, config = RunFolder(workdir), Layout(mesh), task.train
    completed = functools.partial(resumable_settings, task, settings, folder=folder)
    processes.check_same(json.dumps([settings, mesh.to_words()], sort_keys=True))
    with contextlib.ExitStack() as stack:
        interruption = interruption or stack.enter_context(Interruption())
        with processes.together():
            if processes.is_first():
                files = {} if feed is None else feed.files
                begun = folder.begun(settings, resume=resume, completed=completed, files=files)
                stack.enter_context(begun)
        checkpoints = stack.enter_context(
            Checkpoints(folder.checkpoints, keep=config.keep, keep_best=config.keep_best)
        )
        state, first = _first_state(task, layout, checkpoints)
        progress = stack.enter_context(
            Progress(
                task.label,
                start=first,
                total=config.steps,
                seeds=config.seeds,
                shown=processes.is_first(),
            )
        )
        if feed is not None and feed.note:
            progress.note(feed.note)
        records = _records(
            task, folder, first, checkpoints, progress, log_gradients, tensorboard, stack
        )
        state = train(task, feed, layout, state, records, interruption)
        step = int(layout.to_host(state.step)[0])
        seconds, rate = progress.seconds, progress.rate
        if step > first and processes.is_first():
            speed = {"seconds": seconds, "steps_per_second": rate}
            folder.add_timing({"from_step": first, "to_step": step, **speed})
    validation = records.validation
    return TrainedRun(
        task,
        state.params,
        step,
        folder.path,
        (step,),
        seconds=seconds,
        steps_per_second=rate,
        interrupted=interruption.exit_status,
        exhausted=step < config.steps and validation is not None and validation.exhausted,
    )


def check_run(
    task: Task,
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
    folder = RunFolder(workdir)
    feed, settings = _checked_start(
        task, workdir, tensorboard, log_gradients, mesh or whole_machine()
    )
    completed = functools.partial(resumable_settings, task, settings, folder=folder)
    folder.check(settings, resume=resume, completed=completed)
    trace_step(task, feed)


def load_run(workdir: Path | str, step: StepName = "newest", *, average: int = 1) -> TrainedRun:
    """A state of a run, of any task; nothing in its folder is changed.

    Args:
        workdir: the run's folder.
        step: "newest" for the newest good checkpoint; "best" for the kept checkpoint with the best
            validation metric, or without validation the smallest loss; or a step that is kept.
        average: parameters are the mean of those of so many of the newest checkpoints.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or no such checkpoint, or too few
            to average; or the checkpoint is damaged.
    """
    check_integer("average", average)
    workdir = Path(workdir)
    task = task_in(workdir)
    like = jax.eval_shape(functools.partial(initial_state, task))
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
    return TrainedRun(task, params, steps[-1], workdir, steps)


def load_states(workdir: Path | str) -> tuple[Task, dict[int, Callable[[], TrainState]]]:
    """A run's task, and for each available step a function that loads its state.

    The state of step 0 is computed from the seeds; the others are the checkpoints that are kept.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or no checkpoint yet. The
            functions raise it for a damaged state.
    """
    workdir = Path(workdir)
    task = task_in(workdir)
    start = functools.partial(initial_state, task)
    with _kept_checkpoints(workdir) as checkpoints:
        kept = checkpoints.steps()

    def load(step: int) -> TrainState:
        with _kept_checkpoints(workdir) as checkpoints:
            state: TrainState = _restored(checkpoints, jax.eval_shape(start), step).state
        return state

    return task, {0: start, **{step: functools.partial(load, step) for step in kept}}


# --- the start of a run ---


def _checked_start(
    task: Task, workdir: Path, tensorboard: bool, log_gradients: int | None, mesh: MeshShape
) -> tuple[Feed | None, JSON]:
    """The data of a run, and its settings for config.json."""
    if tensorboard:
        require_tensorboard()
    if log_gradients is not None and (log_gradients < 1 or log_gradients % task.train.log_every):
        raise ValueError(
            f"log_gradients must be a positive multiple of log_every {task.train.log_every};"
            f" got {log_gradients}"
        )
    mesh.check(seeds=task.train.seeds, batch_size=task.train.batch_size)
    task.model.describe_parts()  # traces the scores before the data is read, which may take seconds
    folder = RunFolder(workdir).path
    feed = task.feed(folder, multiple_of=mesh.data)
    of_one_device = feed
    if mesh.data > 1 and not is_of_this_package(type(task)):
        of_one_device = task.feed(folder)  # whose program is that of any mesh
    settings = settings_of(task, of_one_device)
    if "program" in settings:
        task.check_numbers()
    return feed, settings


def _first_state(task: Task, layout: Layout, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The newest good state and its step, or the initial state; damaged checkpoints are moved."""
    start = functools.partial(initial_state, task, layout)
    if not checkpoints.steps():
        return start(), 0
    restored = checkpoints.restore(layout.placed(jax.eval_shape(start)))
    assert restored is not None  # there are checkpoints
    if restored.damaged:
        _warn_of_damage(restored, moved_to=checkpoints.set_aside(restored.damaged))
    return restored.state, restored.step


def _records(
    task: Task,
    folder: RunFolder,
    first: int,
    checkpoints: Checkpoints,
    progress: Progress,
    log_gradients: int | None,
    tensorboard: bool,
    stack: contextlib.ExitStack,
) -> Records:
    """Opens the files of a run that starts at step `first`, without the lines after that step."""
    events = folder.path / "tensorboard" if tensorboard else None

    def opened(path: Path, after_step: int, subfolder: str = "") -> MetricsFile | None:
        if not processes.is_first():
            return None
        tensorboard = None if events is None else events / subfolder
        return stack.enter_context(
            MetricsFile(path, after_step=after_step, tensorboard=tensorboard)
        )

    gradients = validation = None
    with processes.together():
        metrics = opened(folder.metrics, first)
        if metrics is not None and metrics.last_step < first:
            warn(
                f"{folder.metrics} ends at step {metrics.last_step}, before the checkpoint of"
                f" step {first}: the lines between are lost"
            )
        if log_gradients is not None:
            # A run that begins anew writes the line of step 0 again.
            gradients = opened(folder.gradients, first or -1, "gradients")
        if task.validation is not None:
            file = opened(folder.validation, first, "validation")
            earlier = [line for line in read_lines(folder.validation) if line["step"] <= first]
            validation = ValidationLog(task, folder.path, file, earlier)
    return Records(checkpoints, progress, metrics, gradients, log_gradients, validation)


# --- checkpoints ---


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
