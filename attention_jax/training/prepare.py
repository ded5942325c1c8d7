"""What may refuse a run is checked here, before a folder is made or the program is compiled."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.runs import processes
from attention_jax.runs.checkpoints import saved_steps
from attention_jax.runs.loggers import Logger, Profile
from attention_jax.runs.run_folder import JSON, check_run_folder
from attention_jax.training.config import Hyperparameters
from attention_jax.training.identity import (
    as_begun,
    check_resumable,
    program_key,
    start_of,
    with_numbers,
)
from attention_jax.training.saved import first_params
from attention_jax.training.settings import check_task, leaves_of
from attention_jax.training.sharding import Layout, MeshShape
from attention_jax.training.step import Compiled, TrainState, batches_of_step, seeds_of
from attention_jax.training.task import Feed, Params, Task, check_metrics, undefined

Loggable = Logger | Sequence[Logger] | None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that may begin or go on. Everything has been checked, and nothing has been made.

    Attributes:
        task: the task, with all settings.
        workdir: the folder.
        resume: whether a run that is there goes on.
        config: the content of config.json.
        feed: batches that the host makes, or None.
        params: to start from, stacked over seeds; None for those of `Task.init`.
        compiled: the compiled calls.
        traced: the first of them; None where the run has had its last step.
        hyperparameters: arguments of the compiled calls; None if they are constants there.
        rates: the learning rate after 0, 1, ... updates; None if the task has an optimiser of its
            own.
        shapes: of the state, with its shardings.
        step: the newest saved step, from which the run goes on if it is not damaged; or 0.
        loggers: of `on_metrics` and `profile`.
        log_gradients: steps between two lines of gradient statistics; None for none.
    """

    task: Task
    workdir: Path
    resume: bool
    config: JSON
    feed: Feed | None
    params: Params | None
    compiled: Compiled
    traced: Any
    hyperparameters: Hyperparameters | None
    rates: np.ndarray | None
    shapes: TrainState
    step: int
    loggers: Sequence[Logger]
    log_gradients: int | None

    @property
    def mesh(self) -> MeshShape:
        """The shape of the mesh."""
        return self.compiled.layout.shape or MeshShape()

    def begin_compiling(self) -> threading.Thread:
        """Compiles the first call in the background, once; `run` does it too, and waits for it."""
        return self._compilation

    @functools.cached_property
    def _compilation(self) -> threading.Thread:

        def compile_first_call(lowered: Any) -> None:
            with contextlib.suppress(Exception):  # the call raises it again
                lowered.compile()

        if self.traced is None or processes.several():  # which compile together, in one order
            thread = threading.Thread()  # has nothing to do
        else:
            thread = threading.Thread(target=compile_first_call, args=[self.traced.lower()])
        thread.start()
        return thread

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the task for the run folder, by name."""
        return {} if self.feed is None else {**self.feed.files}

    def check_folder(self) -> None:
        """Raises ValueError unless the run can begin in its folder, or go on there."""
        stored = check_run_folder(self.workdir, resume=self.resume, files=self.files)
        if stored is not None:
            try:
                check_resumable(self.task, self.config, self.workdir, stored)
            except ValueError as error:
                raise ValueError(f"workdir {self.workdir}: {error}") from error


def prepare(
    task: Task,
    workdir: Path | str,
    *,
    resume: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    on_metrics: Loggable = None,
    profile: int | None = None,
) -> Prepared:
    """Checks everything that may refuse a run, and changes nothing.

    The first call is traced, for the errors of a model, a score or a loss, and not compiled. The
    arguments and the errors are those of `train_run`.
    """
    mesh, folder = mesh or MeshShape.default(), Path(workdir)
    with processes.together():
        # The arguments and the settings.
        several = on_metrics if isinstance(on_metrics, list | tuple) else [on_metrics]
        loggers: list[Any] = [] if on_metrics is None else [*several]
        if not all(map(callable, loggers)):
            raise ValueError(
                f"on_metrics must be a function, a class or several; got {on_metrics!r}"
            )
        if profile is not None:
            check_integer("profile", profile)
            loggers.append(Profile(folder.absolute(), profile))
        task = as_begun(task, folder)
        check_task(task)
        every = task.train.log_every
        if log_gradients is not None and (log_gradients < 1 or log_gradients % every):
            raise ValueError(
                f"log_gradients must be a positive multiple of log_every {every}; got"
                f" {log_gradients}"
            )
        if log_gradients is not None and type(task).statistics is Task.statistics:
            raise undefined(task, "statistics(loss, params, batch, rng)")
        if not isinstance(mesh, MeshShape):
            raise ValueError(f"mesh must be a MeshShape or None; got {mesh!r}")
        mesh.check(seeds=task.train.seeds, batch_size=task.train.batch_size)
        # The data, the parameters to start from, and what users wrote.
        feed, config = start_of(task, folder, multiple_of=mesh.data)
        params, digest = first_params(task, folder, resumes=True)
        config |= digest
        # The program.
        numbers = task.train.hyperparameters() if type(task).optimizer is Task.optimizer else None
        hyperparameters = numbers if task.train.takes_hyperparameters else None
        layout = Layout(mesh)
        key = program_key(config, has_arguments=hyperparameters is not None)
        compiled = Compiled(task, layout, key)
        prepared = Prepared(
            task=task,
            workdir=folder,
            resume=resume,
            config=config,
            feed=feed,
            params=params,
            compiled=compiled,
            traced=None,
            hyperparameters=hyperparameters,
            rates=None if numbers is None else numbers.rates,
            shapes=layout.placed(compiled.first_state.eval_shape(seeds_of(task), None)),
            step=max(saved_steps(folder / "checkpoints"), default=0),
            loggers=loggers,
            log_gradients=log_gradients,
        )
        # The folder, which the other processes need not see.
        if processes.is_first():
            prepared.check_folder()
            prepared = dataclasses.replace(prepared, config=with_numbers(task, config, folder))
        if prepared.step < task.train.steps:
            traced = compiled.trace(prepared.shapes, prepared.step, feed, hyperparameters)
            prepared = dataclasses.replace(prepared, traced=traced)
            if log_gradients is not None:
                batches = batches_of_step(task, feed, prepared.step)
                metrics = compiled.statistics.eval_shape(prepared.shapes, batches)
                check_metrics(f"task {task.name}", "statistics(...)", metrics)
    options = {"log_gradients": log_gradients, "mesh": dataclasses.asdict(mesh)}
    processes.check_equal(leaves_of({**config, **options}))
    return prepared
