"""Training, many steps and many seeds in one compiled call. Knows no model and no task."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from attention_jax.checks import check_whole
from attention_jax.training import processes
from attention_jax.training.checkpoints import Checkpoints
from attention_jax.training.interruption import Interruption
from attention_jax.training.progress import Progress
from attention_jax.training.run_folder import MetricsFile
from attention_jax.training.sharding import Layout

Array = jax.Array
Params = Any
Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """All that a run is; what a checkpoint holds. Stacked on a leading axis for several seeds."""

    step: Array  # int32 [], steps done
    seed: Array  # int32 [], from which parameters and batches are drawn
    params: Params
    opt_state: optax.OptState


class Task(NamedTuple):
    """What is to be learned: three pure functions."""

    init: Callable[[Array], Params]  # rng -> params
    batch: Callable[[Array], Any]  # rng -> batch
    loss: Callable[[Params, Any, Array], tuple[Array, Metrics]]  # params, batch, rng -> loss, more


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long, how often, how many.

    Attributes:
        seeds: runs trained at once, which differ in initial parameters and batches.
        first_seed: the seeds are first_seed, first_seed + 1, ...
        steps: optimiser steps of each seed.
        log_every: steps in one compiled call, and between two lines of metrics.jsonl.
        checkpoint_every: steps between two checkpoints, a multiple of `log_every`.
        keep: checkpoints that are kept, the newest ones.
        keep_best: those kept beside them, with the smallest loss (of `log_every` steps, all seeds).
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
            check_whole(name, getattr(self, name))
        for name in ("first_seed", "keep_best"):
            check_whole(name, getattr(self, name), 0)
        if self.first_seed + self.seeds > 2**31:
            raise ValueError(
                f"first_seed must leave all seeds below 2**31, as int32; got {self.first_seed}"
            )
        if self.checkpoint_every % self.log_every:
            raise ValueError(
                f"checkpoint_every must be a multiple of log_every {self.log_every};"
                f" got {self.checkpoint_every}"
            )


class GradientLog(NamedTuple):
    """Statistics that are taken now and then, beside the training that they do not change."""

    every: int  # steps, a multiple of `log_every`
    statistics: Callable[..., Metrics]  # loss, params, batch, rng -> {name: float []}, pure
    file: MetricsFile | None  # None on processes that write nothing


def check_gradient_log_every(every: int, config: LoopConfig) -> None:
    """Raises ValueError unless statistics can be taken as often as that."""
    if every < 1 or every % config.log_every:
        raise ValueError(
            f"log_gradients every must be a positive multiple of log_every {config.log_every};"
            f" got {every}"
        )


def initial_state(
    task: Task,
    optimizer: optax.GradientTransformation,
    config: LoopConfig,
    layout: Layout | None = None,
) -> TrainState:
    """The stacked state of all seeds before the first step; on one device, without a layout."""

    def init(seed: Array) -> TrainState:
        params = task.init(_rng(seed, "init"))
        # Without weak types, which a step would lose: the second call would compile again.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), params)
        return TrainState(jnp.zeros((), jnp.int32), seed, params, optimizer.init(params))

    seeds = config.first_seed + jnp.arange(config.seeds, dtype=jnp.int32)
    start = jax.vmap(init)
    shardings = None if layout is None else layout.shardings(jax.eval_shape(start, seeds))
    return jax.jit(start, out_shardings=shardings)(seeds)


def train_step(
    task: Task, optimizer: optax.GradientTransformation, state: TrainState, batch: Any, rng: Array
) -> tuple[TrainState, Metrics]:
    """One step of one seed, pure."""
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    (loss, metrics), dparams = gradient(state.params, batch, rng)
    # optax counts on JAX's ordinary promotion, which careful users turn off.
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
    """`count` steps of one seed in one scan; metrics are means over them.

    What a step draws, its batch and its dropout, depends on (seed, step) alone: a run can stop and
    go on anywhere. With a layout, each device draws its own part of the batch.
    """
    if layout is not None:
        task = _spread(task, layout)

    def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        state, metrics = train_step(task, optimizer, state, *_drawn(task, state))
        return state if layout is None else layout.constrained_state(state), metrics

    state, metrics = jax.lax.scan(step, state, length=count)
    return state, jax.tree.map(jnp.mean, metrics)


def gradient_statistics(
    task: Task, statistics: Callable[..., Metrics], state: TrainState
) -> Metrics:
    """What a `GradientLog` writes of a stacked state: of each seed's next batch, [seeds] each."""

    def one_seed(state: TrainState) -> Metrics:
        return statistics(task.loss, state.params, *_drawn(task, state))

    return jax.vmap(one_seed)(state)


def train(
    task: Task,
    optimizer: optax.GradientTransformation,
    config: LoopConfig,
    state: TrainState,
    *,
    checkpoints: Checkpoints,
    metrics_file: MetricsFile | None,
    progress: Progress,
    interruption: Interruption,
    gradient_log: GradientLog | None = None,
    layout: Layout | None = None,
) -> TrainState:
    """Runs until `config.steps`, or until the interruption asks to stop, and saves at the end.

    Args:
        task: what to learn.
        optimizer: how.
        config: how long, how often, how many.
        state: from `initial_state` or a checkpoint.
        checkpoints: where states go.
        metrics_file: where each call's mean metrics go, a list with one entry a seed; None on
            processes that write nothing.
        progress: what the user sees.
        interruption: whether to stop at the next boundary; one process's is that of all.
        gradient_log: what to look at every so many steps, the first and the last included; it sees
            the batch that the next step would learn from.
        layout: where the state lies; one device if left out.

    Returns:
        the state reached; it has been saved.

    Raises:
        ValueError: a line or a checkpoint cannot be written.
    """
    layout = layout or Layout()
    everywhere = layout.everywhere

    @functools.partial(
        jax.jit,
        static_argnums=0,
        donate_argnums=1,
        out_shardings=(layout.shardings(state), everywhere),
    )
    def advance(count: int, state: TrainState) -> tuple[TrainState, Metrics]:
        def one_seed(state: TrainState) -> tuple[TrainState, Metrics]:
            return train_steps(task, optimizer, count, state, layout)

        return jax.vmap(one_seed, spmd_axis_name="seed")(state)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def look(state: TrainState) -> Metrics:
        assert gradient_log is not None
        return gradient_statistics(task, gradient_log.statistics, state)

    def log_gradients(step: int, state: TrainState) -> None:
        if gradient_log is not None and (step % gradient_log.every == 0 or step == config.steps):
            _write(gradient_log.file, step, _by_seed(look(state)))

    def save(step: int, state: TrainState, loss: float | None) -> None:
        with processes.together():
            if metrics_file is not None:
                metrics_file.sync()  # no checkpoint is ahead of the lines before it
        checkpoints.save(step, state, metric=loss)

    state = jax.device_put(state, layout.shardings(state))
    step = int(layout.fetched(state.step)[0])
    loss: float | None = None
    if step == 0:
        log_gradients(step, state)
    while step < config.steps and not interruption.agreed():
        # Chunks end at multiples of log_every wherever a run begins, so that a resumed run makes
        # the same calls as one that was never stopped, and ends bit-identical to it.
        count = min(config.log_every - step % config.log_every, config.steps - step)
        state, metrics = advance(count, state)
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
    checkpoints.wait()
    return state


def _spread(task: Task, layout: Layout) -> Task:
    """The task, told where its batches and the parameters lie."""

    def batch(rng: Array) -> Any:
        return layout.constrained_batch(task.batch(rng))

    def loss(params: Params, batch: Any, rng: Array) -> tuple[Array, Metrics]:
        return task.loss(layout.gathered(params), batch, rng)

    return Task(task.init, batch, loss)


def _drawn(task: Task, state: TrainState) -> tuple[Any, Array]:
    """The next step's batch, and its key for the loss."""
    batch = task.batch(jax.random.fold_in(_rng(state.seed, "batch"), state.step))
    return batch, jax.random.fold_in(_rng(state.seed, "loss"), state.step)


def _write(file: MetricsFile | None, step: int, line: dict[str, list[float]]) -> None:
    with processes.together():
        if file is not None:
            file.write(step, line)


def _by_seed(metrics: Metrics) -> dict[str, list[float]]:
    return {name: [float(x) for x in values] for name, values in metrics.items()}


def _rng(seed: Array, purpose: Literal["init", "batch", "loss"]) -> Array:
    return jax.random.fold_in(jax.random.key(seed), ("init", "batch", "loss").index(purpose))
