"""The training loop: many steps and seeds in one compiled call. It knows no model and no task."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.core.checks import check_integer
from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import MetricsFile
from attention_jax.runs.progress import Progress
from attention_jax.training.gradient_log import GradientLog
from attention_jax.training.sharding import Layout
from attention_jax.training.validation import Validation

Array = jax.Array
Params = Any
Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """The whole state of a run, which is what a checkpoint holds; several seeds are stacked."""

    step: Array  # int32 [], steps done
    seed: Array  # int32 [], determines the initial parameters, the batches and the dropout
    params: Params
    opt_state: optax.OptState


class Task(NamedTuple):
    """Pure functions that define what is learned; batches are drawn on the device."""

    init: Callable[[Array], Params]  # rng -> params
    batch: Callable[[Array], Any]  # rng -> batch
    loss: Callable[[Params, Any, Array], tuple[Array, Metrics]]  # params, batch, rng


class FedTask(NamedTuple):
    """Functions that define what is learned; batches are made on the host, for example from files.

    `feed` maps (seed, step) to a batch of NumPy arrays whose shapes depend on the step alone.
    Without it, the task can be initialised and evaluated, but not trained.
    """

    init: Callable[[Array], Params]  # rng -> params
    feed: Callable[[int, int], Any] | None
    loss: Callable[[Params, Any, Array], tuple[Array, Metrics]]  # params, batch, rng


AnyTask = Task | FedTask


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Length of training, and how often it logs and saves.

    Attributes:
        seeds: runs trained at once; they differ in initial parameters, batches and dropout.
        first_seed: the seeds are first_seed, first_seed + 1, ...
        steps: optimiser steps of each seed.
        log_every: steps in one compiled call, and between two lines of metrics.jsonl.
        checkpoint_every: steps between two checkpoints, a multiple of `log_every`.
        keep: how many of the newest checkpoints are kept.
        keep_best: how many further checkpoints are kept, those with the smallest validation metric,
            or without validation the smallest training loss (mean over `log_every` steps and all
            seeds).
    """

    seeds: int = 5
    first_seed: int = 0
    steps: int = 2500
    log_every: int = 25
    checkpoint_every: int = 500
    keep: int = 2
    keep_best: int = 0

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "log_every", "checkpoint_every", "keep"):
            check_integer(name, getattr(self, name))
        for name in ("first_seed", "keep_best"):
            check_integer(name, getattr(self, name), 0)
        if self.first_seed + self.seeds > 2**31:
            raise ValueError(
                f"first_seed must leave all seeds below 2**31, as int32; got {self.first_seed}"
            )
        if self.checkpoint_every % self.log_every:
            raise ValueError(
                f"checkpoint_every must be a multiple of log_every {self.log_every};"
                f" got {self.checkpoint_every}"
            )


class Training(NamedTuple):
    """What is trained, how, how long and where."""

    task: AnyTask
    optimizer: optax.GradientTransformation
    loop: LoopConfig
    layout: Layout | None = None  # None for one device


class Records(NamedTuple):
    """Where training reports to; files are None on processes that write nothing."""

    checkpoints: Checkpoints
    progress: Progress
    metrics_file: MetricsFile | None
    gradient_log: GradientLog | None = None
    validation: Validation | None = None


def initial_state(
    task: AnyTask,
    optimizer: optax.GradientTransformation,
    config: LoopConfig,
    layout: Layout | None = None,
) -> TrainState:
    """The stacked state of all seeds before the first step; on one device if there is no layout."""

    def init(seed: Array) -> TrainState:
        params = task.init(_rng(seed, "init"))
        # A step would lose weak types, and the second call would compile again.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), params)
        return TrainState(jnp.zeros((), jnp.int32), seed, params, optimizer.init(params))

    seeds = config.first_seed + jnp.arange(config.seeds, dtype=jnp.int32)
    start = jax.vmap(init)
    shardings = None if layout is None else layout.shardings(jax.eval_shape(start, seeds))
    return jax.jit(start, out_shardings=shardings)(seeds)


def train_step(
    task: AnyTask,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Any,
    rng: Array,
) -> tuple[TrainState, Metrics]:
    """One step of one seed, pure."""
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    (loss, metrics), dparams = gradient(state.params, batch, rng)
    # optax relies on standard promotion, which the user may have turned off.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(dparams, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, **metrics, "gradient_norm": optax.tree.norm(dparams)}
    return TrainState(state.step + 1, state.seed, params, opt_state), metrics


def train_steps(
    task: Task,
    optimizer: optax.GradientTransformation,
    count: int,
    state: TrainState,
    layout: Layout | None = None,
) -> tuple[TrainState, Metrics]:
    """`count` steps of one seed in one scan; metrics are means over these steps.

    The batch and the dropout of a step depend on (seed, step) alone, so that a run can stop and
    resume at any step. With a layout, each device draws its own part of the batch.
    """
    unsharded = task
    if layout is not None:
        task = task._replace(
            batch=lambda rng: layout.constrained_batch(unsharded.batch(rng)),
            loss=layout.with_gathered_params(task.loss),
        )

    def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        state, metrics = train_step(task, optimizer, state, *_drawn(task, state))
        return state if layout is None else layout.constrained_state(state), metrics

    state, metrics = jax.lax.scan(step, state, length=count)
    return state, jax.tree.map(jnp.mean, metrics)


def gradient_statistics(
    task: AnyTask, statistics: Callable[..., Metrics], state: TrainState, batches: Any = None
) -> Metrics:
    """The `statistics` of a `GradientLog`, on the batch of each seed's next step: each [seeds].

    The state is stacked over seeds; so are the batches, which only a `FedTask` needs.
    """

    def one_seed(state: TrainState, batch: Any) -> Metrics:
        batch, rng = _drawn(task, state) if isinstance(task, Task) else (batch, _loss_rng(state))
        return statistics(task.loss, state.params, batch, rng)

    return jax.vmap(one_seed)(state, batches)


def trace_step(task: AnyTask, optimizer: optax.GradientTransformation, config: LoopConfig) -> None:
    """Traces the first step without computing it: raises what a model, score or loss raises."""
    state = jax.eval_shape(functools.partial(initial_state, task, optimizer, config))

    def one_seed(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        batch, rng = _drawn(task, state) if isinstance(task, Task) else (batch, _loss_rng(state))
        return train_step(task, optimizer, state, batch, rng)

    jax.eval_shape(jax.vmap(one_seed), state, next_batches(task, config, 0))


def train(
    training: Training, state: TrainState, records: Records, interruption: Interruption
) -> TrainState:
    """Trains until the last step, a request to stop, or the end of validation's patience.

    Args:
        training: what is trained.
        state: from `initial_state` or a checkpoint.
        records: metrics are written after each compiled call, a list with one entry per seed.
            Gradient statistics are logged as often as `GradientLog` says, at the first step and at
            the last. Validation runs at each checkpoint; without it, the training loss decides
            which checkpoints are the best.
        interruption: whether to stop after the current call; all processes stop together.

    Returns:
        the last state, which has been saved.

    Raises:
        ValueError: a line or a checkpoint cannot be written.
    """
    task, _, config, _ = training
    layout = training.layout or Layout()
    training = training._replace(layout=layout)
    checkpoints, progress, metrics_file, gradient_log, validation = records

    compiled = _compiled_drawn if isinstance(task, Task) else _compiled_fed
    advance = compiled(training, layout.shardings(state))

    @functools.partial(jax.jit, out_shardings=layout.replicated)
    def compute_statistics(state: TrainState, batches: Any) -> Metrics:
        assert gradient_log is not None
        return gradient_statistics(task, gradient_log.statistics, state, batches)

    def log_gradients(step: int, state: TrainState) -> None:
        if gradient_log is not None and (step % gradient_log.every == 0 or step == config.steps):
            metrics = compute_statistics(state, next_batches(task, config, step))
            _write(gradient_log.file, step, _by_seed(metrics))

    def save(step: int, state: TrainState, loss: float | None) -> None:
        metric = loss
        if validation is not None:
            # Never validate where a signal stopped the run: an undisturbed run does not either.
            planned = step > 0 and (step % config.checkpoint_every == 0 or step == config.steps)
            params = jax.tree.map(layout.to_host, state.params) if planned else None
            metric = validation.validate(step, params, progress.note) if planned else None
        with processes.together():
            for file in (metrics_file, None if validation is None else validation.file):
                if file is not None:
                    file.sync()  # the lines up to a checkpoint are on disk before it is
        checkpoints.save(step, state, metric=metric)

    state = jax.device_put(state, layout.shardings(state))
    step = int(layout.to_host(state.step)[0])
    loss: float | None = None
    if step == 0:
        log_gradients(step, state)
    while (
        step < config.steps
        and not (validation is not None and validation.exhausted)
        and not interruption.agreed()
    ):
        # Calls end at multiples of log_every wherever a run begins: a resumed run makes the same
        # calls as a run that was never stopped, and ends bit-identical to it.
        count = min(config.log_every - step % config.log_every, config.steps - step)
        state, metrics = advance(step, count, state)
        step += count
        line = _by_seed(metrics)
        loss = statistics.fmean(line["loss"])
        _write(metrics_file, step, line)
        log_gradients(step, state)
        progress.update(step, line)
        if step % config.checkpoint_every == 0:
            save(step, state, loss)
    if checkpoints.latest_step() != step:
        save(step, state, loss)
    return state


# --- Advancing several steps: (first step, count, state) -> (state, mean metrics) ---

Advance = Callable[[int, int, TrainState], tuple[TrainState, Metrics]]


def _compiled_drawn(training: Training, shardings: Any) -> Advance:
    """All steps in one compiled call."""
    program = drawn_program(training, shardings)
    return lambda first, count, state: program(count, state)


def drawn_program(training: Training, shardings: Any) -> Any:
    """The jitted program (count, state) -> (state, mean metrics) of a `Task`."""
    task, optimizer, _, layout = training
    assert isinstance(task, Task)
    assert layout is not None

    @functools.partial(
        jax.jit,
        static_argnums=0,
        donate_argnums=1,
        out_shardings=(shardings, layout.replicated),
    )
    def advance(count: int, state: TrainState) -> tuple[TrainState, Metrics]:
        def one_seed(state: TrainState) -> tuple[TrainState, Metrics]:
            return train_steps(task, optimizer, count, state, layout)

        return jax.vmap(one_seed, spmd_axis_name="seed")(state)

    return advance


def fed_program(training: Training, shardings: Any) -> Any:
    """The jitted program (state, batches) -> (state, metrics) of a `FedTask`: one step."""
    task, optimizer, _, layout = training
    assert isinstance(task, FedTask)
    assert layout is not None
    sharded = task._replace(loss=layout.with_gathered_params(task.loss))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, layout.replicated))
    def one_step(state: TrainState, batches: Any) -> tuple[TrainState, Metrics]:
        def one_seed(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            batch, rng = layout.constrained_batch(batch), _loss_rng(state)
            state, metrics = train_step(sharded, optimizer, state, batch, rng)
            return layout.constrained_state(state), metrics

        return jax.vmap(one_seed, spmd_axis_name="seed")(state, batches)

    return one_step


def _compiled_fed(training: Training, shardings: Any) -> Advance:
    """One call per step, one program per batch shape; meanwhile the host makes the next batch."""
    task, _, config, _ = training
    one_step = fed_program(training, shardings)

    def advance(first: int, count: int, state: TrainState) -> tuple[TrainState, Metrics]:
        by_step = []
        for step in range(first, first + count):
            state, metrics = one_step(state, next_batches(task, config, step))
            by_step.append(metrics)
        return state, jax.tree.map(lambda *steps: np.mean(np.stack(steps), axis=0), *by_step)

    return advance


# --- Random numbers and batches: functions of (seed, step) ---


def _drawn(task: Task, state: TrainState) -> tuple[Any, Array]:
    """The next step's batch, and the rng for its loss."""
    batch = task.batch(jax.random.fold_in(_rng(state.seed, "batch"), state.step))
    return batch, _loss_rng(state)


def _loss_rng(state: TrainState) -> Array:
    return jax.random.fold_in(_rng(state.seed, "loss"), state.step)


def next_batches(task: AnyTask, config: LoopConfig, step: int) -> Any:
    """The batches of a `FedTask`, stacked over seeds; None for a task that draws its own."""
    if isinstance(task, Task):
        return None
    assert task.feed is not None
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    return jax.tree.map(
        lambda *leaves: np.stack(leaves), *(task.feed(seed, step) for seed in seeds)
    )


def _rng(seed: Array, purpose: Literal["init", "batch", "loss"]) -> Array:
    return jax.random.fold_in(jax.random.key(seed), ("init", "batch", "loss").index(purpose))


# --- Metrics ---


def _write(file: MetricsFile | None, step: int, line: dict[str, list[float]]) -> None:
    with processes.together():
        if file is not None:
            file.write(step, line)


def _by_seed(metrics: Metrics) -> dict[str, list[float]]:
    return {name: [float(x) for x in values] for name, values in metrics.items()}
