"""A run in the order of time: `prepare` checks everything that may refuse, then `run` trains.

`train_run(task, workdir)` is `run(prepare(task, workdir))`. Of several runs all are prepared before
the first one trains, so that a mistake in the last one is found at once.

The state of a run is one `TrainState` of all seeds. A compiled call takes it `log_every` steps
further. After each call the first process writes a line, and at a checkpoint the whole state; see
`Records`.
"""

import contextlib
import time
from pathlib import Path

import jax

from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.progress import Progress
from attention_jax.runs.run_folder import open_run_folder
from attention_jax.training.prepare import Loggable, Prepared, prepare
from attention_jax.training.records import Records, by_seed
from attention_jax.training.saved import TrainedRun, keep_first_params, load_run, load_states
from attention_jax.training.sharding import MeshShape
from attention_jax.training.step import seeds_of
from attention_jax.training.task import Task

__all__ = ["Prepared", "TrainedRun", "load_run", "load_states", "prepare", "run", "train_run"]


def train_run(
    task: Task,
    workdir: Path | str,
    *,
    resume: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    interruption: Interruption | None = None,
    on_metrics: Loggable = None,
    profile: int | None = None,
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

    Returns:
        the run at its last step, or where a signal stopped it.

    Raises:
        ValueError: a setting, the data, a part of a user or the folder does not fit, and nothing
            has been changed; or another process trains there, all checkpoints are damaged, a file
            cannot be written, or a validation breaks its contract.
    """
    prepared = prepare(
        task,
        workdir,
        resume=resume,
        log_gradients=log_gradients,
        mesh=mesh,
        on_metrics=on_metrics,
        profile=profile,
    )
    return run(prepared, interruption=interruption)


def run(
    prepared: Prepared, *, interruption: Interruption | None = None, peak: float | None = None
) -> TrainedRun:
    """Trains what `prepare` has checked; see `train_run`.

    Args:
        prepared: the run.
        interruption: as in `train_run`.
        peak: as in `Progress`, for the log.
    """
    task, train, compiled = prepared.task, prepared.task.train, prepared.compiled
    began = time.monotonic()
    folder = prepared.workdir.absolute()  # the task may change the current folder
    with contextlib.ExitStack() as stack:
        interruption = interruption or stack.enter_context(Interruption())
        compilation = prepared.begin_compiling()
        # The first process opens the folder and reads the newest checkpoint; then all have it.
        checkpoints = restored = origin = None
        with processes.together():
            if processes.is_first():
                opened = open_run_folder(
                    folder, prepared.config, prepared.files, check=prepared.check_folder
                )
                origin = stack.enter_context(opened)
                keep_first_params(folder, prepared.params)
                checkpoints = Checkpoints(
                    folder / "checkpoints", keep=train.keep, keep_best=train.keep_best
                )
                if checkpoints.steps():
                    restored = checkpoints.restore(prepared.shapes)
        state = processes.from_first(restored, prepared.shapes)
        if state is None:
            state = compiled.first_state(seeds_of(task), prepared.params)
        state = jax.device_put(state, compiled.layout.by_seed)
        step = first_step = int(processes.whole(state.step)[0])
        counts = {"start": step, "total": train.steps, "seeds": train.seeds}
        progress = Progress(task.label, **counts, peak=peak, began=began)
        records = Records(prepared, folder, checkpoints, progress, origin)
        stack.callback(records.close)
        records.begin(step, state)
        compilation.join()
        loss = None
        while step < train.steps and not interruption.agreed():
            # Calls end at multiples of log_every wherever a run begins: a resumed run makes the
            # same calls as a run that was never stopped, and ends bit-identical to it.
            count = train.steps_of_call(step)
            progress.begin()
            state, metrics, tokens = compiled.advance(
                state, step, count, prepared.feed, prepared.hyperparameters
            )
            step += count
            line = by_seed(metrics)
            loss = records.write_metrics(step, line, progress.update(step, line["loss"], tokens))
            records.write_gradients(step, state)
            if step % train.checkpoint_every == 0:
                records.save(step, state, loss)
        records.save(step, state, loss)
        records.end(first_step, step)
    params = processes.whole(state.params)
    rate = progress.speed.get("steps_per_second")
    status = interruption.exit_status
    return TrainedRun(task, params, step, folder, progress.seconds, rate, status)
