"""The training loop: many steps and seeds in one compiled call. It knows no model and no task."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.loggers import Loggers
from attention_jax.runs.metrics_file import add_line, last_line
from attention_jax.runs.processes import first_does, whole
from attention_jax.runs.progress import Progress
from attention_jax.runs.run_folder import sync, writing
from attention_jax.training.metrics import finite_mean
from attention_jax.training.sharding import Layout
from attention_jax.training.task import Feed, Metrics, Params, Task, Validation, check_metrics

Array = jax.Array


LINES = ("metrics", "gradients", "validation")  # the files of lines by step


class TrainState(NamedTuple):
    """The whole state of a run, which is what a checkpoint holds; several seeds are stacked."""

    step: Array  # int32 [], steps done
    seed: Array  # int32 [], determines the initial parameters, the batches and the dropout
    params: Params
    opt_state: optax.OptState


class Records(NamedTuple):
    """The files and the progress to which training reports."""

    folder: Path
    checkpoints: Checkpoints
    progress: Progress
    loggers: Loggers
    log_gradients: int | None = None  # steps between two lines of `Task.statistics`

    def write(self, name: str, step: int, metrics: dict[str, list[float]]) -> None:
        """Adds a line to a file, and sends it to the loggers."""
        add_line(self.folder / f"{name}.jsonl", {"step": step, **metrics})
        prefix = "" if name == "metrics" else f"{name}/"
        self.loggers(step, {prefix + metric: values for metric, values in metrics.items()})


# --- one seed: pure functions ---


def train_step(task: Task, state: TrainState, batch: Any, rng: Array) -> tuple[TrainState, Metrics]:
    """One step of one seed."""
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    (loss, metrics), dparams = gradient(state.params, batch, rng)
    # optax relies on standard promotion, which the user may have turned off.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = task.optimizer().update(dparams, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, **metrics, "gradient_norm": optax.tree.norm(dparams)}
    return TrainState(state.step + 1, state.seed, params, opt_state), metrics


def train_steps(
    task: Task, count: int, state: TrainState, layout: Layout | None = None
) -> tuple[TrainState, Metrics]:
    """`count` steps of one seed of a task that draws its batches; metrics are means over them.

    The batch and the dropout of a step depend on (seed, step) alone, so that a run can stop and
    resume at any step. With a layout, each device draws its own part of the batch.
    """
    step = functools.partial(_step, task, layout or Layout())
    last, metrics = jax.lax.scan(step, state, length=count)
    # XLA would multiply by the inverse of a count that it knows: 41 ones would have another mean.
    steps = last.step - state.step

    def mean(each: Array) -> Array:
        dtype = accumulator_dtype(each)
        return jnp.sum(each, dtype=dtype) / steps.astype(dtype)

    return last, jax.tree.map(mean, metrics)


def _step(task: Task, layout: Layout, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    """One step of one seed with a batch from the host; None for a task that draws its batches."""
    batch = layout.constrained(_batch_of_step(task, state, batch), "data")
    state, metrics = train_step(task, state, batch, _rng_of_step(state, "loss"))
    return layout.constrained(state), metrics


def _batch_of_step(task: Task, state: TrainState, batch: Any) -> Any:
    """The given batch; if it is None, the batch that the task draws for the state's next step."""
    size = task.train.batch_size
    if batch is not None or size is None:
        return batch
    return task.batch(_rng_of_step(state, "batch"), size=size)


def _rng_of_step(state: TrainState, purpose: Literal["batch", "loss"]) -> Array:
    return jax.random.fold_in(_rng(state.seed, purpose), state.step)


def _rng(seed: Array, purpose: Literal["init", "batch", "loss"]) -> Array:
    return jax.random.fold_in(jax.random.key(seed), ("init", "batch", "loss").index(purpose))


# --- all seeds, stacked ---


def initial_state(
    task: Task, layout: Layout | None = None, params: Params | None = None
) -> TrainState:
    """The stacked state of all seeds before the first step.

    Args:
        task: the task.
        layout: the devices; None for one device.
        params: parameters to start from, stacked over seeds; None for those of `Task.init`.
    """

    def init(seed: Array, params: Params | None) -> TrainState:
        params = task.init(_rng(seed, "init")) if params is None else params
        # A step would lose weak types, and the second call would compile again.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), params)
        return TrainState(jnp.zeros((), jnp.int32), seed, params, task.optimizer().init(params))

    first = task.train.first_seed
    seeds = np.arange(first, first + task.train.seeds, dtype=np.int32)
    start = jax.jit(jax.vmap(init), out_shardings=None if layout is None else layout.by_seed)
    return start(seeds, params)


def state_shapes(task: Task) -> TrainState:
    """The shapes and dtypes of `initial_state`, computed without its arrays."""
    shapes: TrainState = jax.eval_shape(functools.partial(initial_state, task))
    return shapes


def batches_of_step(task: Task, feed: Feed | None, step: int) -> Any:
    """The batches that the host makes for a step, stacked over seeds; None without a feed."""
    if feed is None:
        return None
    seeds = range(task.train.first_seed, task.train.first_seed + task.train.seeds)
    batches = [feed.batch(seed, step) for seed in seeds]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def gradient_statistics(task: Task, state: TrainState, batches: Any = None) -> Metrics:
    """`Task.statistics` on the batch of each seed's next step: each [seeds].

    Args:
        task: the task.
        state: stacked over seeds.
        batches: from `batches_of_step`, for a task that does not draw its own.
    """

    def one_seed(state: TrainState, batch: Any) -> Metrics:
        rng = _rng_of_step(state, "loss")
        return task.statistics(task.loss, state.params, _batch_of_step(task, state, batch), rng)

    return jax.vmap(one_seed)(state, batches)


def trace_step(task: Task, feed: Feed | None = None) -> None:
    """Traces the first step without computing it, for the errors of a model, score or loss."""
    one_seed = functools.partial(_step, task, Layout())
    jax.eval_shape(jax.vmap(one_seed), state_shapes(task), batches_of_step(task, feed, 0))


# --- compiled calls: (first step, count, state) -> (state, mean metrics) ---

Advance = Callable[[int, int, TrainState], tuple[TrainState, Metrics]]


def _advance(task: Task, feed: Feed | None, layout: Layout) -> Advance:
    """All steps in one call; or with a feed one call per step, while the host makes the next."""

    def compiled(one_seed: Callable[..., tuple[TrainState, Metrics]]) -> Any:
        return jax.jit(
            jax.vmap(one_seed, spmd_axis_name="seed"),
            donate_argnums=0,
            out_shardings=(layout.by_seed, layout.replicated),
        )

    @functools.cache
    def drawn_steps(count: int) -> Any:
        return compiled(functools.partial(train_steps, task, count, layout=layout))

    if feed is None:
        return lambda first, count, state: drawn_steps(count)(state)
    fed_step = compiled(functools.partial(_step, task, layout))

    def advance(first: int, count: int, state: TrainState) -> tuple[TrainState, Metrics]:
        by_step = []
        for step in range(first, first + count):
            state, metrics = fed_step(state, batches_of_step(task, feed, step))
            by_step.append(metrics)
        return state, jax.tree.map(lambda *steps: np.mean(np.stack(steps), axis=0), *by_step)

    return advance


# --- the loop ---


def train(
    task: Task,
    feed: Feed | None,
    layout: Layout,
    state: TrainState,
    records: Records,
    interruption: Interruption,
) -> TrainState:
    """Trains until the last step or a request to stop.

    Args:
        task: what is trained, and how long.
        feed: from `Task.feed`.
        layout: the devices.
        state: from `initial_state` or a checkpoint.
        records: metrics are written after each compiled call, a list with one entry per seed.
            Gradient statistics are logged every `log_gradients` steps, at the first step and at the
            last. Validation runs at each checkpoint; without it, the training loss decides
            which checkpoints are the best.
        interruption: whether to stop after the current call.

    Returns:
        the last state, which has been saved.

    Raises:
        ValueError: a line or a checkpoint cannot be written.
    """
    steps, every = task.train.steps, records.log_gradients
    advance = _advance(task, feed, layout)
    measure = jax.jit(functools.partial(gradient_statistics, task), out_shardings=layout.replicated)

    def log_gradients(step: int, state: TrainState) -> None:
        if every is not None and (step % every == 0 or step == steps):
            metrics = measure(state, batches_of_step(task, feed, step))
            check_metrics(f"task {task.name}", "statistics(...)", metrics)
            line = _by_seed(metrics)
            first_does(lambda: records.write("gradients", step, line))

    def save(step: int, state: TrainState, loss: float | None) -> None:
        host_state = whole(state)
        first_does(lambda: save_on_disk(step, host_state, loss))

    def save_on_disk(step: int, state: TrainState, loss: float | None) -> None:
        """Validates and saves, unless both have been done for this step."""
        # A stop by a signal is not planned: it neither validates nor keeps a checkpoint for good.
        planned = step > 0 and (step % task.train.checkpoint_every == 0 or step == steps)
        metric, rule = (loss, task.validation) if planned else (None, None)
        is_saved = step in records.checkpoints.steps()
        if is_saved and rule is None:
            return
        if rule is not None:
            line = last_line(records.folder / "validation.jsonl", step)
            if line.get("step") != step or rule.metric not in line:
                try:
                    line = _validated(task, rule, state.params, records.folder)
                except Exception:
                    if not is_saved:  # an error of the task loses no step
                        keep(step, state, None, temporary=True)
                    raise
                records.write("validation", step, line)
                means = ", ".join(f"{name} {statistics.fmean(x):.4g}" for name, x in line.items())
                records.progress.note(f"step {step}, validation: {means}")
            metric = rule.loss(line)
        keep(step, state, metric, temporary=not planned)

    def keep(step: int, state: TrainState, metric: float | None, *, temporary: bool) -> None:
        for name in LINES:
            if (path := records.folder / f"{name}.jsonl").exists():
                with writing("file", path):
                    sync(path)  # the lines up to a checkpoint are on disk before it is
        records.checkpoints.save(step, state, metric=metric, temporary=temporary)

    state = jax.device_put(state, layout.by_seed)
    step = int(whole(state.step)[0])
    loss: float | None = None
    log_every = task.train.log_every
    if step == 0:
        log_gradients(step, state)
    else:
        save(step, state, loss)  # where the validation of this checkpoint has failed
    while step < steps and not interruption.agreed():
        # Calls end at multiples of log_every wherever a run begins: a resumed run makes the same
        # calls as a run that was never stopped, and ends bit-identical to it.
        count = min(log_every - step % log_every, steps - step)
        records.progress.begin()
        state, metrics = advance(step, count, state)
        step += count
        line = _by_seed(metrics)
        records.progress.update(step, line["loss"])
        loss = finite_mean(line["loss"])
        first_does(functools.partial(records.write, "metrics", step, line))
        log_gradients(step, state)
        if step % task.train.checkpoint_every == 0:
            save(step, state, loss)
    save(step, state, loss)
    return state


def _validated(
    task: Task, rule: Validation, params: Params, folder: Path
) -> dict[str, list[float]]:
    """The metrics of `Task.validate` as a line; ValueError unless each has a number per seed."""
    metrics, method = task.validate(jax.device_get(params), folder), "validate(params, folder)"
    check_metrics(f"task {task.name}", method, metrics)
    shapes = {name: np.shape(values) for name, values in metrics.items()}
    if {*shapes.values()} != {(task.train.seeds,)} or rule.metric not in shapes:
        raise ValueError(
            f"task {task.name}: {method} must give {rule.metric!r}, and for each metric"
            f" {task.train.seeds} numbers, one for each seed; got the shapes {shapes}"
        )
    return {name: np.asarray(values, np.float64).tolist() for name, values in metrics.items()}


def _by_seed(metrics: Metrics) -> dict[str, list[float]]:
    return {name: np.asarray(values).tolist() for name, values in metrics.items()}
