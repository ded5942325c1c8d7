"""Training, many steps and many seeds in one compiled call. Knows no model and no task."""

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
from attention_jax.runs.progress import Progress
from attention_jax.runs.run_folder import MetricsFile
from attention_jax.training.sharding import Layout
from attention_jax.training.validation import Validation

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
    """What is to be learned: pure functions. Batches are drawn on the device, or fed to it."""

    init: Callable[[Array], Params]  # rng -> params
    batch: Callable[[Array], Any]  # rng -> batch; `never_drawn` for a task that is fed
    loss: Callable[[Params, Any, Array], tuple[Array, Metrics]]  # params, batch, rng -> loss, more
    # seed, step -> batch of NumPy arrays, of shapes that depend on the step alone
    feed: Callable[[int, int], Any] | None = None


def never_drawn(rng: Array) -> Any:
    """The `batch` of a task that is fed."""
    raise NotImplementedError("this task is fed: its batches are made outside the program")


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
    task: Task, statistics: Callable[..., Metrics], state: TrainState, batches: Any = None
) -> Metrics:
    """What a `GradientLog` writes of a stacked state: of each seed's next batch, [seeds] each.

    `batches` are those of a task that is fed, stacked over seeds.
    """

    def one_seed(state: TrainState, batch: Any) -> Metrics:
        batch, rng = _drawn(task, state) if task.feed is None else (batch, _loss_rng(state))
        return statistics(task.loss, state.params, batch, rng)

    return jax.vmap(one_seed)(state, batches)


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
    validation: Validation | None = None,
    layout: Layout | None = None,
) -> TrainState:
    """Runs until `config.steps`, or it is asked to stop or no longer improves; saves at the end.

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
        validation: what to measure at each checkpoint, for choosing the best and for stopping
            early; without, the best checkpoints are those with the smallest training loss.
        layout: where the state lies; one device if left out.

    Returns:
        the state reached; it has been saved.

    Raises:
        ValueError: a line or a checkpoint cannot be written.
    """
    layout = layout or Layout()
    everywhere = layout.everywhere

    compiled = _compiled_drawn if task.feed is None else _compiled_fed
    advance = compiled(task, optimizer, config, layout, layout.shardings(state))

    @functools.partial(jax.jit, out_shardings=everywhere)
    def look(state: TrainState, batches: Any) -> Metrics:
        assert gradient_log is not None
        return gradient_statistics(task, gradient_log.statistics, state, batches)

    def log_gradients(step: int, state: TrainState) -> None:
        if gradient_log is not None and (step % gradient_log.every == 0 or step == config.steps):
            _write(gradient_log.file, step, _by_seed(look(state, _fed(task, config, step))))

    def save(step: int, state: TrainState, loss: float | None) -> None:
        metric = loss
        if validation is not None:
            # A stop on the way is no point to validate at: a resumed run would not come by it.
            planned = step > 0 and (step % config.checkpoint_every == 0 or step == config.steps)
            params = jax.tree.map(layout.fetched, state.params) if planned else None
            metric = validation.at(step, params, progress.note) if planned else None
        with processes.together():
            for file in (metrics_file, None if validation is None else validation.file):
                if file is not None:
                    file.sync()  # no checkpoint is ahead of the lines before it
        checkpoints.save(step, state, metric=metric)

    state = jax.device_put(state, layout.shardings(state))
    step = int(layout.fetched(state.step)[0])
    loss: float | None = None
    if step == 0:
        log_gradients(step, state)
    while (
        step < config.steps
        and not (validation is not None and validation.exhausted)
        and not interruption.agreed()
    ):
        # Chunks end at multiples of log_every wherever a run begins, so that a resumed run makes
        # the same calls as one that was never stopped, and ends bit-identical to it.
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
    checkpoints.wait()
    return state


# --- a compiled call, or a call for each batch: (first, count, state) -> (state, metrics) ---


def _compiled_drawn(task, optimizer, config, layout, shardings) -> Any:
    """All steps in one call."""
    del config

    @functools.partial(
        jax.jit,
        static_argnums=0,
        donate_argnums=1,
        out_shardings=(shardings, layout.everywhere),
    )
    def advance(count: int, state: TrainState) -> tuple[TrainState, Metrics]:
        def one_seed(state: TrainState) -> tuple[TrainState, Metrics]:
            return train_steps(task, optimizer, count, state, layout)

        return jax.vmap(one_seed, spmd_axis_name="seed")(state)

    return lambda first, count, state: advance(count, state)


def _compiled_fed(task, optimizer, config, layout, shardings) -> Any:
    """A call a step, one program for each shape of batches; the next batch is made meanwhile."""
    spread = _spread(task, layout)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, layout.everywhere))
    def one_step(state: TrainState, batches: Any) -> tuple[TrainState, Metrics]:
        def one_seed(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            batch, rng = layout.constrained_batch(batch), _loss_rng(state)
            state, metrics = train_step(spread, optimizer, state, batch, rng)
            return layout.constrained_state(state), metrics

        return jax.vmap(one_seed, spmd_axis_name="seed")(state, batches)

    def advance(first: int, count: int, state: TrainState) -> tuple[TrainState, Metrics]:
        found = []
        for step in range(first, first + count):
            state, metrics = one_step(state, _fed(task, config, step))
            found.append(metrics)
        return state, jax.tree.map(lambda *steps: np.mean(np.stack(steps), axis=0), *found)

    return advance


def _spread(task: Task, layout: Layout) -> Task:
    """The task, told where its batches and the parameters lie."""

    def batch(rng: Array) -> Any:
        return layout.constrained_batch(task.batch(rng))

    def loss(params: Params, batch: Any, rng: Array) -> tuple[Array, Metrics]:
        return task.loss(layout.gathered(params), batch, rng)

    return task._replace(batch=batch, loss=loss)


def _drawn(task: Task, state: TrainState) -> tuple[Any, Array]:
    """The next step's batch, and its key for the loss."""
    batch = task.batch(jax.random.fold_in(_rng(state.seed, "batch"), state.step))
    return batch, _loss_rng(state)


def _loss_rng(state: TrainState) -> Array:
    return jax.random.fold_in(_rng(state.seed, "loss"), state.step)


def _fed(task: Task, config: LoopConfig, step: int) -> Any:
    """The batches of all seeds, stacked; None for a task that draws them."""
    if task.feed is None:
        return None
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    return jax.tree.map(
        lambda *leaves: np.stack(leaves), *(task.feed(seed, step) for seed in seeds)
    )


def _write(file: MetricsFile | None, step: int, line: dict[str, list[float]]) -> None:
    with processes.together():
        if file is not None:
            file.write(step, line)


def _by_seed(metrics: Metrics) -> dict[str, list[float]]:
    return {name: [float(x) for x in values] for name, values in metrics.items()}


def _rng(seed: Array, purpose: Literal["init", "batch", "loss"]) -> Array:
    return jax.random.fold_in(jax.random.key(seed), ("init", "batch", "loss").index(purpose))
