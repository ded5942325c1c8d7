"""A training run in its folder: train it, resume it, load it; the same functions for every task."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

from attention_jax.core.programs import is_of_this_package
from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints, Restored, StepName
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import add_line, drop_lines_after
from attention_jax.runs.progress import Progress
from attention_jax.runs.run_folder import JSON, begun, check_begins
from attention_jax.training.loop import Records, TrainState, initial_state, trace_step, train
from attention_jax.training.settings import (
    check_equal_in_all,
    check_resumable,
    check_task,
    checked_feed,
    describe_parts,
    settings_of,
    task_in,
)
from attention_jax.training.sharding import Layout, MeshShape
from attention_jax.training.task import Feed, Params, Task, undefined


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that was trained or loaded.

    Attributes:
        task: the task, with all settings.
        params: stacked over seeds.
        step: how far it was trained.
        workdir: its folder, if it has one.
        seconds: wall time of this call of `train_run`, compilation included.
        steps_per_second: of all seeds together, compilation excluded.
        interrupted: 130, 143 or 129, the exit status, if a signal asked to stop; else 0.
    """

    task: Any  # a `Task`
    params: Params
    step: int
    workdir: Path | None = None
    seconds: float | None = None
    steps_per_second: float | None = None
    interrupted: int = 0

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
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    interruption: Interruption | None = None,
) -> TrainedRun:
    """Trains in a folder, from its newest good checkpoint or from the start.

    Args:
        task: what is learned, with all settings.
        workdir: the folder.
        resume: continue the run that is there. The settings must be those of the run, except for
            `train.steps` where the learning rate does not depend on it, and for the name of a
            user's score, which may be renamed or rewritten if it gives the same numbers. A finished
            run then goes on, and ends bit-identical to a run that had all steps from the start, if
            it had ended at a multiple of `log_every` (with validation, of `checkpoint_every`).
        log_gradients: steps between two lines of gradient statistics in gradients.jsonl.
        mesh: over which devices; None for one device, or with several processes for all devices,
            which spread the batch. A run may be resumed on another mesh.
        interruption: the caller's own, entered, for several runs; None to watch for signals during
            this run.

    Raises:
        ValueError: a setting, the data or the folder does not fit, and nothing has been changed; or
            all checkpoints are damaged; or a file cannot be written.
    """
    folder, mesh = Path(workdir), mesh or MeshShape.default()
    with processes.together():
        feed, settings = _checked_start(task, folder, log_gradients, mesh)
    options = {"log_gradients": log_gradients, "mesh": dataclasses.asdict(mesh)}
    check_equal_in_all({**settings, **options})
    folder = folder.absolute()  # the task may change the current folder
    layout, config = Layout(mesh), task.train
    with contextlib.ExitStack() as stack:
        interruption = interruption or stack.enter_context(Interruption())
        check_same = functools.partial(check_resumable, task, settings, folder)
        files = {} if feed is None else feed.files
        run = begun(folder, settings, resume=resume, check_same=check_same, files=files)
        keep: Any = {"keep": config.keep, "keep_best": config.keep_best}
        with processes.together():
            if processes.is_first():
                stack.enter_context(run)
            checkpoints = Checkpoints(
                folder / "checkpoints", **keep, read_only=not processes.is_first()
            )
        state, first = _first_state(task, layout, checkpoints)
        with processes.together():
            # A run without a checkpoint starts over, and writes the line of step 0 again.
            for name in ("metrics", "gradients", "validation") if processes.is_first() else ():
                drop_lines_after(folder / f"{name}.jsonl", first or -1)
        progress = Progress(task.label, start=first, total=config.steps, seeds=config.seeds)
        if feed is not None and feed.note:
            progress.note(feed.note)
        records = Records(folder, checkpoints, progress, log_gradients)
        state = train(task, feed, layout, state, records, interruption)
        step = int(processes.whole(state.step)[0])
        seconds, rate = progress.seconds, progress.rate
        if step > first:
            speed = {"seconds": seconds, "steps_per_second": rate}
            line = {"from_step": first, "to_step": step, **speed}
            processes.first_does(lambda: add_line(folder / "timing.jsonl", line))
    return TrainedRun(
        task,
        processes.whole(state.params),
        step,
        folder,
        seconds=seconds,
        steps_per_second=rate,
        interrupted=interruption.exit_status,
    )


def check_run(
    task: Task,
    workdir: Path,
    *,
    resume: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
) -> None:
    """Raises the errors with which `train_run` would not begin; changes nothing.

    The first step is traced too, which raises the errors of a model, a score or a loss.
    """
    feed, settings = _checked_start(task, workdir, log_gradients, mesh or MeshShape.default())
    check_same = functools.partial(check_resumable, task, settings, workdir)
    check_begins(workdir, resume=resume, check_same=check_same)
    trace_step(task, feed)


def _checked_start(
    task: Task, folder: Path, log_gradients: int | None, mesh: MeshShape
) -> tuple[Feed | None, JSON]:
    """The data of a run, and its settings for config.json."""
    check_task(task)
    every = task.train.log_every
    if log_gradients is not None and (log_gradients < 1 or log_gradients % every):
        raise ValueError(
            f"log_gradients must be a positive multiple of log_every {every}; got {log_gradients}"
        )
    if log_gradients is not None and type(task).statistics is Task.statistics:
        raise undefined(task, "statistics(loss, params, batch, rng)")
    if not isinstance(mesh, MeshShape):
        raise ValueError(f"mesh must be a MeshShape or None; got {mesh!r}")
    mesh.check(seeds=task.train.seeds, batch_size=task.train.batch_size)
    parts = describe_parts(task)  # before the data is read, which may take seconds
    feed = checked_feed(task, folder, multiple_of=mesh.data)
    if is_of_this_package(type(task)):
        return feed, settings_of(task, feed, parts)
    # The program is that of one device, whatever the mesh is.
    settings = settings_of(task, feed if mesh.data == 1 else task.feed(folder), parts)
    task.check_numbers()
    return feed, settings


def _first_state(task: Task, layout: Layout, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The newest good state and its step, or the initial state."""
    start = functools.partial(initial_state, task, layout)
    like = layout.placed(jax.eval_shape(start))
    restored: Restored | None = None
    with processes.together():
        if processes.is_first() and checkpoints.steps():
            restored = checkpoints.restore(like)
    step = processes.exchanged("" if restored is None else str(restored.step))[0]
    if not step:
        return start(), 0
    return processes.from_first(restored and restored.state, like), int(step)


def load_run(
    workdir: Path | str, step: StepName = "newest", *, score: str | None = None
) -> TrainedRun:
    """A state of a run, of any task; nothing in its folder is changed.

    Args:
        workdir: the run's folder.
        step: "newest" for the newest good checkpoint; "best" for the kept checkpoint with the best
            validation metric, or without validation the smallest loss; or a step that is kept.
        score: what the score of the run is called now, "module:Name", if its file or its class has
            another name. It must give the same numbers.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or no such checkpoint; or the
            checkpoint is damaged.
    """
    task, kept = _saved_run(Path(workdir), score)
    restored = kept.restore(jax.eval_shape(functools.partial(initial_state, task)), step)
    return TrainedRun(task, restored.state.params, restored.step, Path(workdir))


def load_states(
    workdir: Path | str, *, score: str | None = None
) -> tuple[Task, dict[int, TrainState]]:
    """A run's task, and its states by step: the kept ones, and that of step 0, computed again.

    Args:
        workdir: the run's folder.
        score: as in `load_run`.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or no checkpoint yet, or a damaged
            one.
    """
    task, kept = _saved_run(Path(workdir), score)
    start = functools.partial(initial_state, task)
    like = jax.eval_shape(start)
    return task, {0: start(), **{step: kept.restore(like, step).state for step in kept.steps()}}


def _saved_run(workdir: Path, score: str | None) -> tuple[Task, Checkpoints]:
    """A run's task and its checkpoints; raises ValueError if there are none."""
    task = task_in(workdir, score=score)
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    if not checkpoints.steps():
        raise ValueError(f"workdir {workdir} has no checkpoint yet; train it first")
    return task, checkpoints
