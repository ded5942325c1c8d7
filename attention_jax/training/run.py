"""A run in its folder: begun or gone on with, trained, saved. Knows no model and no task."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import optax

from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints, Restored
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.progress import Progress
from attention_jax.runs.run_folder import JSON, NO_FILES, MetricsFile, RunFolder, read_lines
from attention_jax.training.loop import (
    GradientLog,
    LoopConfig,
    Metrics,
    Task,
    TrainState,
    initial_state,
    train,
)
from attention_jax.training.sharding import Layout
from attention_jax.training.validation import Validation, ValidationPlan


class Run(NamedTuple):
    """What a run is of."""

    task: Task
    optimizer: optax.GradientTransformation
    loop: LoopConfig
    label: str  # for the user
    settings: JSON  # all of them, for config.json
    completed: Callable[[JSON], JSON] = dict  # stored settings, with defaults of younger ones
    files: Mapping[str, bytes] = NO_FILES  # what else it is, kept in the folder by name
    validation: ValidationPlan | None = None


class Reached(NamedTuple):
    """How far it came."""

    state: TrainState  # stacked over seeds
    step: int
    seconds: float  # wall time, compilation included
    steps_per_second: float | None  # of all seeds together, without compilation
    interrupted: int  # 130 or 143, an exit status, if a signal asked to stop; else 0
    exhausted: bool = False  # stopped because validation no longer improved


def train_in_folder(
    run: Run,
    folder: RunFolder,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    gradient_statistics: tuple[int, Callable[..., Metrics]] | None = None,
    layout: Layout | None = None,
) -> Reached:
    """Trains from the newest good checkpoint in the folder, or from the start.

    Args:
        run: what to train.
        folder: where it is kept.
        resume: go on with the run that is there.
        tensorboard: also write TensorBoard events.
        gradient_statistics: every so many steps, these to gradients.jsonl.
        layout: on which devices; one if left out. No part of the run: it may go on on others.

    Raises:
        ValueError: the folder is not fit for it, or in use, and nothing has been changed; or no
            state there is as it was saved; or something cannot be written.
    """
    layout = layout or Layout()
    processes.check_same(json.dumps([run.settings, layout.shape.to_words()], sort_keys=True))
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        with processes.together():
            if processes.is_first():
                begun = folder.begun(
                    run.settings, resume=resume, completed=run.completed, files=run.files
                )
                stack.enter_context(begun)
        loop = run.loop
        checkpoints = Checkpoints(folder.checkpoints, keep=loop.keep, keep_best=loop.keep_best)
        stack.enter_context(checkpoints)
        start = functools.partial(initial_state, run.task, run.optimizer, loop, layout)
        restored = checkpoints.restore(layout.placed(jax.eval_shape(start)))
        if restored is None:
            state, first = start(), 0
        else:
            state, first = restored.state, restored.step
            if restored.damaged:
                tell_damage(restored, aside=checkpoints.set_aside(restored.damaged))
        metrics, gradient_log, validation = None, None, None
        with processes.together():
            if processes.is_first():
                events = folder.path / "tensorboard" if tensorboard else None
                metrics = MetricsFile(folder.metrics, after_step=first, tensorboard=events)
                stack.enter_context(metrics)
                if metrics.last_step < first:
                    print(
                        f"warning: {folder.metrics} ends at step {metrics.last_step}, before the"
                        f" checkpoint of step {first}: the lines between are lost",
                        file=sys.stderr,
                    )
            if gradient_statistics is not None:
                gradient_log = GradientLog(*gradient_statistics, None)
                if processes.is_first():
                    file = _gradients_file(folder, first, tensorboard)
                    gradient_log = gradient_log._replace(file=stack.enter_context(file))
            if run.validation is not None:
                lines: MetricsFile | None = None
                if processes.is_first():
                    events = folder.path / "tensorboard" / "validation" if tensorboard else None
                    lines = MetricsFile(folder.validation, after_step=first, tensorboard=events)
                    stack.enter_context(lines)
                earlier = [line for line in read_lines(folder.validation) if line["step"] <= first]
                validation = Validation(run.validation, lines, earlier)
        progress = Progress(
            run.label, start=first, total=loop.steps, seeds=loop.seeds, shown=processes.is_first()
        )
        stack.enter_context(progress)
        state = train(
            run.task,
            run.optimizer,
            loop,
            state,
            checkpoints=checkpoints,
            metrics_file=metrics,
            progress=progress,
            interruption=interruption,
            gradient_log=gradient_log,
            validation=validation,
            layout=layout,
        )
        reached = int(layout.fetched(state.step)[0])
        seconds, rate = progress.seconds, progress.rate
        if reached > first and processes.is_first():
            speed = {"seconds": seconds, "steps_per_second": rate}
            folder.add_timing({"from_step": first, "to_step": reached, **speed})
    exhausted = reached < loop.steps and validation is not None and validation.exhausted
    return Reached(state, reached, seconds, rate, interruption.exit_status, exhausted)


def tell_damage(restored: Restored, *, aside: Path | None = None) -> None:
    """Says on standard error which checkpoints were passed over, and where they were moved to."""
    for step, reason in restored.damaged.items() if processes.is_first() else ():
        moved = "" if aside is None else f" and was moved to {aside}"
        print(
            f"warning: the checkpoint of step {step} is damaged ({reason}){moved};"
            f" that of step {restored.step} is used",
            file=sys.stderr,
        )


def _gradients_file(folder: RunFolder, first: int, tensorboard: bool) -> MetricsFile:
    # Nothing is known before the first step but what this run will write.
    events = folder.path / "tensorboard" / "gradients" if tensorboard else None
    return MetricsFile(folder.gradients, after_step=first if first else -1, tensorboard=events)
