"""A training run in its folder: train it, resume it, load it; the same functions for every task."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from attention_jax.core.checks import check_integer
from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints, Restored, StepName, saved_steps
from attention_jax.runs.environment import usable_cpus
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.loggers import Logger, Loggers, Profile
from attention_jax.runs.metrics_file import add_line, drop_lines_after
from attention_jax.runs.progress import Progress, Work, warn
from attention_jax.runs.run_folder import JSON, check_run_folder, open_run_folder, read_json
from attention_jax.training.loop import (
    LINES,
    Records,
    TrainState,
    initial_state,
    state_shapes,
    trace_step,
    train,
)
from attention_jax.training.resuming import as_begun, check_equal_in_all, check_resumable
from attention_jax.training.saved_run import SavedRun, first_params, keep_first_params
from attention_jax.training.settings import check_task, start_of, with_numbers
from attention_jax.training.sharding import Layout, MeshShape
from attention_jax.training.task import Feed, Params, Task, undefined

Loggable = Logger | Sequence[Logger] | None


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
        check_integer("seed_index", seed_index, 0, self.task.train.seeds - 1)
        return jax.tree.map(lambda leaf: leaf[seed_index], self.params)

    def describe(self, seed_index: int | None = None) -> str:
        """The run in words: "reversal additive: step 300 of 2500 (not finished), seed 0"."""
        task, steps = self.task, self.task.train.steps
        kept = [] if self.workdir is None else saved_steps(self.workdir / "checkpoints")
        unfinished = "" if max([self.step, *kept]) >= steps else " (not finished)"
        many = f"{task.train.seeds} seed{'s' * (task.train.seeds > 1)}"
        seeds = many if seed_index is None else f"seed {seed_index}"
        name = " ".join(dict.fromkeys((task.name, task.label)))
        return f"{name}: step {self.step} of {steps}{unfinished}, {seeds}"


def train_run(
    task: Task,
    workdir: Path,
    *,
    resume: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    interruption: Interruption | None = None,
    on_metrics: Loggable = None,
    profile: int | None = None,
    on_start: Callable[[TrainedRun, Feed | None], Work] | None = None,
) -> TrainedRun:
    """Trains in a folder, from its newest good checkpoint or from the start.

    Args:
        task: what is learned, with all settings.
        workdir: the folder.
        resume: continue the run that is there. The settings must be those of the run, except for
            those in `TrainConfig.free_on_resume`, for `train.steps` where the learning rate does
            not depend on it, and for the name of a user's score, which may be renamed or rewritten
            if it gives the same numbers. A finished run then goes on. On a CPU it ends
            bit-identical to a run that had all steps from the start, if it had ended at a multiple
            of `log_every` (with validation, of `checkpoint_every`); before JAX 0.12 only with as
            many usable processors.
        log_gradients: steps between two lines of gradient statistics in gradients.jsonl.
        mesh: over which devices; None for one device, or with several processes for all devices,
            which spread the batch. A run may be resumed on another mesh.
        interruption: the caller's own, entered, for several runs; None to watch for signals during
            this run.
        on_metrics: a function f(step, metrics), or a class that is called with the folder and the
            content of config.json and makes such a function; or several of them. It gets each line
            of metrics.jsonl as {name: a list with a number per seed}, and those of validation.jsonl
            and gradients.jsonl under the names "validation/..." and "gradients/...". At the end its
            method `close()` is called, if it has one. An exception costs it a warning, and the run
            goes on.
        profile: how many steps after the first compiled call JAX's profiler traces, to the folder
            "profile".
        on_start: called before the first step with the run and its feed; returns what a step takes,
            for the speed in the log. The run's `params` are those of all seeds, until the first
            step deletes them.

    Returns:
        the run at its last step, or where a signal stopped it.

    Raises:
        ValueError: a setting, the data or the folder does not fit, and nothing has been changed; or
            all checkpoints are damaged; or a file cannot be written.
    """
    mesh = mesh or MeshShape.default()
    with processes.together():
        task, feed, config, params = _checked(
            task, Path(workdir), log_gradients, mesh, on_metrics, profile
        )
    options = {"log_gradients": log_gradients, "mesh": dataclasses.asdict(mesh)}
    check_equal_in_all({**config, **options})
    folder = Path(workdir).absolute()  # the task may change the current folder
    layout, is_first = Layout(mesh), processes.is_first()
    with contextlib.ExitStack() as stack:
        interruption = interruption or stack.enter_context(Interruption())
        # The first process opens the folder; then all processes have the newest or the first state.
        check_same = functools.partial(check_resumable, task, config, folder)
        files = {} if feed is None else feed.files
        with processes.together():
            if is_first:
                config = with_numbers(task, config, folder)
                stack.enter_context(
                    open_run_folder(
                        folder, config, resume=resume, check_same=check_same, files=files
                    )
                )
                keep_first_params(folder, params)
            keep: Any = {"keep": task.train.keep, "keep_best": task.train.keep_best}
            checkpoints = Checkpoints(folder / "checkpoints", **keep, read_only=not is_first)
        state, first_step = _first_state(task, layout, checkpoints, params)
        processes.first_does(lambda: _drop_logs_after(folder, first_step))
        if is_first and first_step:
            _warn_of_cpus(folder)
        # What training reports to.
        initial_run = TrainedRun(task, state.params, first_step, Path(workdir))
        with processes.together():
            work = on_start and on_start(initial_run, feed)
        counts = {"start": first_step, "total": task.train.steps, "seeds": task.train.seeds}
        progress = Progress(task.label, **counts, work=work)
        if feed is not None and feed.note:
            progress.note(feed.note)
        profilers = [] if profile is None else [Profile(folder, profile)]
        loggers = [*_as_list(on_metrics), *profilers] if is_first else []
        log = Loggers(loggers, folder, config)
        stack.callback(log.close)
        records = Records(folder, checkpoints, progress, log, log_gradients)
        state = train(task, feed, layout, state, records, interruption)
        # How long it took.
        step = int(processes.whole(state.step)[0])
        seconds, rate = progress.seconds, progress.speed.get("steps_per_second")
        if step > first_step:
            speed = {"seconds": seconds, "steps_per_second": rate, **progress.speed}
            line = {"from_step": first_step, "to_step": step, **speed}
            processes.first_does(lambda: add_line(folder / "timing.jsonl", line))
    params = processes.whole(state.params)
    return TrainedRun(task, params, step, folder, seconds, rate, interruption.exit_status)


def check_run(
    task: Task,
    workdir: Path,
    *,
    resume: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    on_metrics: Loggable = None,
    profile: int | None = None,
) -> None:
    """Raises the errors with which `train_run` would not begin; changes nothing.

    It traces the first step too, which raises the errors of a model, a score or a loss. The
    arguments are those of `train_run`.

    Raises:
        ValueError: as in `train_run`.
    """
    mesh = mesh or MeshShape.default()
    task, feed, config, _ = _checked(task, workdir, log_gradients, mesh, on_metrics, profile)
    check_same = functools.partial(check_resumable, task, config, workdir)
    files = {} if feed is None else feed.files
    check_run_folder(workdir, resume=resume, check_same=check_same, files=files)
    trace_step(task, feed)


def _checked(
    task: Task,
    folder: Path,
    log_gradients: int | None,
    mesh: MeshShape,
    on_metrics: Loggable,
    profile: int | None,
) -> tuple[Task, Feed | None, JSON, Params | None]:
    """Checks all arguments; returns the task, its data, the content of config.json, and parameters.

    The task is that of `as_begun`. The parameters are None unless `init_from` names them and the
    run has no checkpoint yet.
    """
    if not all(map(callable, _as_list(on_metrics))):
        raise ValueError(f"on_metrics must be a function, a class or several; got {on_metrics!r}")
    if profile is not None:
        check_integer("profile", profile)
    task = as_begun(task, folder)
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
    feed, config = start_of(task, folder, multiple_of=mesh.data)
    params, digest = first_params(task, folder, resumes=True)
    return task, feed, {**config, **digest}, params


def _as_list(on_metrics: Loggable) -> list[Any]:
    if isinstance(on_metrics, list | tuple):
        return [*on_metrics]
    return [] if on_metrics is None else [on_metrics]


def _drop_logs_after(folder: Path, step: int) -> None:
    # A run without a checkpoint starts over, and writes the line of step 0 again.
    for name in LINES:
        drop_lines_after(folder / f"{name}.jsonl", step or -1)
    drop_lines_after(folder / "timing.jsonl")  # none but one that a crash has cut off


def _warn_of_cpus(folder: Path) -> None:
    # XLA divided sums between the processors before JAX 0.12.
    before = None
    with contextlib.suppress(ValueError):
        before = read_json(folder / "env.json").get("usable_cpus")
    now, on_cpu = usable_cpus(), jax.default_backend() == "cpu"
    if on_cpu and before not in (None, now) and jax.__version_info__ < (0, 12):
        warn(
            f"the run began on {before} usable processors and goes on with {now}: with jax"
            f" {jax.__version__} its bits may differ from those of a run that was never stopped"
        )


def _first_state(
    task: Task, layout: Layout, checkpoints: Checkpoints, params: Params | None
) -> tuple[TrainState, int]:
    """Returns the newest good state and its step, or the initial state and 0."""
    like = layout.placed(state_shapes(task))
    restored: Restored | None = None
    with processes.together():
        if processes.is_first() and checkpoints.steps():
            restored = checkpoints.restore(like)
    step = processes.exchanged("" if restored is None else str(restored.step))[0]
    if not step:
        return initial_state(task, layout, params), 0
    return processes.from_first(restored and restored.state, like), int(step)


def load_run(
    workdir: Path | str, step: StepName = "newest", *, score: str | None = None
) -> TrainedRun:
    """Loads a run, of any task, at one of its steps, and changes nothing in its folder.

    Args:
        workdir: the run's folder.
        step: "newest" for the newest good checkpoint; "best" for the kept checkpoint with the best
            validation metric, or without validation the smallest loss; a step that is kept; or 0
            for the parameters before training, which are computed anew.
        score: what the score of the run is called now, "module:Name", if its file or its class has
            another name. It must give the same numbers. For other parts of a user give the setting,
            too, "task=module:Name", with spaces between several: `task`, `self_attention_score`,
            `normalizer`, `self_attention_normalizer`.

    Returns:
        the run with the parameters of that step.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or no such checkpoint; or the
            checkpoint is damaged.
    """
    run = SavedRun(Path(workdir), score)
    restored = run.restore(step)
    return TrainedRun(run.task, restored.state.params, restored.step, run.workdir)


def load_states(
    workdir: Path | str, *, score: str | None = None
) -> tuple[Task, dict[int, TrainState]]:
    """Loads a run's task, and its states by step: the kept states, and step 0 computed anew.

    Args:
        workdir: the run's folder.
        score: as in `load_run`.

    Returns:
        the task, and {step: state}.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or a damaged checkpoint.
    """
    run = SavedRun(Path(workdir), score)
    return run.task, {step: run.restore(step).state for step in run.steps}
