"""A training step, and the compiled calls of many steps and seeds. They know no model and no task.

`train_step` is one step of one seed. A compiled call scans it over steps and maps it over seeds;
`Compiled` has the calls of a run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.training.config import Hyperparameters
from attention_jax.training.sharding import Layout
from attention_jax.training.task import Feed, Metrics, Params, Task

Array = jax.Array


class TrainState(NamedTuple):
    """The whole state of a run, which is what a checkpoint holds; several seeds are stacked."""

    step: Array  # int32 [], steps done
    seed: Array  # int32 [], determines the initial parameters, the batches and the dropout
    params: Params
    opt_state: optax.OptState


# --- one seed: pure functions ---


def train_step(
    task: Task, state: TrainState, batch: Any, rng: Array, given: Hyperparameters | None = None
) -> tuple[TrainState, Metrics]:
    """One step of one seed.

    Args:
        task: the task.
        state: of the seed.
        batch: from `Task.batch` or a feed.
        rng: for dropout.
        given: the numbers of the optimiser; None for those of the task, as constants.
    """
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    (loss, metrics), dparams = gradient(state.params, batch, rng)
    optimizer = task.optimizer() if given is None else task.train.transformation(given)
    # optax relies on standard promotion, which the user may have turned off.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(dparams, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, **metrics, "gradient_norm": optax.tree.norm(dparams)}
    return TrainState(state.step + 1, state.seed, params, opt_state), metrics


def train_steps(
    task: Task,
    count: int,
    state: TrainState,
    given: Hyperparameters | None = None,
    *,
    layout: Layout | None = None,
) -> tuple[TrainState, Metrics]:
    """`count` steps of one seed of a task that draws its batches; metrics are means over them.

    The batch and the dropout of a step depend on (seed, step) alone, so that a run can stop and
    resume at any step. With a layout, each device draws its own part of the batch.
    """

    def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        return _step(task, state, None, given, layout=layout)

    last, metrics = jax.lax.scan(step, state, length=count)
    # XLA would multiply by the inverse of a count that it knows: 41 ones would have another mean.
    steps = last.step - state.step

    def mean(each: Array) -> Array:
        dtype = accumulator_dtype(each)
        return jnp.sum(each, dtype=dtype) / steps.astype(dtype)

    return last, jax.tree.map(mean, metrics)


def _step(
    task: Task,
    state: TrainState,
    batch: Any,
    given: Hyperparameters | None,
    *,
    layout: Layout | None,
) -> tuple[TrainState, Metrics]:
    """One step of one seed with a batch from the host; None for a task that draws its batches."""
    layout = layout or Layout()
    batch = layout.constrained(_batch_of_step(task, state, batch), "data")
    state, metrics = train_step(task, state, batch, _rng_of_step(state, "loss"), given)
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


def _first_state(task: Task, seed: Array, params: Params | None) -> TrainState:
    """The state of one seed before the first step, with given parameters or those of the task."""
    params = task.init(_rng(seed, "init")) if params is None else params
    # A step would lose weak types, and the second call would compile again.
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), params)
    return TrainState(jnp.zeros((), jnp.int32), seed, params, task.optimizer().init(params))


def _statistics(task: Task, state: TrainState, batch: Any) -> Metrics:
    rng = _rng_of_step(state, "loss")
    return task.statistics(task.loss, state.params, _batch_of_step(task, state, batch), rng)


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
    state: TrainState = Compiled(task, layout).first_state(seeds_of(task), params)
    return state


def state_shapes(task: Task) -> TrainState:
    """The shapes and dtypes of `initial_state`, computed without its arrays."""
    shapes: TrainState = Compiled(task).first_state.eval_shape(seeds_of(task), None)
    return shapes


def seeds_of(task: Task) -> np.ndarray:
    """The seeds of a task, int32 [seeds]."""
    first = task.train.first_seed
    return np.arange(first, first + task.train.seeds, dtype=np.int32)


def batches_of_step(task: Task, feed: Feed | None, step: int) -> Any:
    """The batches that the host makes for a step, stacked over seeds; None without a feed."""
    if feed is None:
        return None
    batches = [feed.batch(seed, step) for seed in seeds_of(task).tolist()]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def drawn_shapes(task: Task) -> Any:
    """The shapes and dtypes of a batch that the task draws."""
    size: Any = task.train.batch_size
    return jax.eval_shape(lambda: task.batch(jax.random.key(0), size=size))


def gradient_statistics(task: Task, state: TrainState, batches: Any = None) -> Metrics:
    """`Task.statistics` on the batch of each seed's next step: each [seeds].

    Args:
        task: the task.
        state: stacked over seeds.
        batches: from `batches_of_step`, for a task that does not draw its own.
    """
    return jax.vmap(functools.partial(_statistics, task))(state, batches)


# --- compiled ---


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled calls of a run; all seeds are stacked.

    Attributes:
        task: the task.
        layout: the devices; None for one that JAX chooses.
        key: runs with equal keys share their calls, so that they are traced and compiled once. Only
            tasks of equal programs may have equal keys; None shares nothing.
    """

    task: Task = dataclasses.field(compare=False)
    layout: Layout | None = None
    key: str | None = None

    @property
    def first_state(self) -> Any:
        """(seeds, params or None) -> the initial state."""
        return _jitted(self, _first_state)

    @property
    def step(self) -> Any:
        """(state, batches, hyperparameters) -> (state, metrics), after one step."""
        return _jitted(self, _step)

    def steps(self, count: int) -> Any:
        """(state, hyperparameters) -> (state, mean metrics), after `count` steps."""
        return _jitted(self, train_steps, count)

    @property
    def statistics(self) -> Any:
        """(state, batches) -> `gradient_statistics`."""
        return _jitted(self, _statistics)

    def trace(self, state: Any, step: int, feed: Feed | None, given: Any) -> None:
        """Traces the call after a step, for the errors of a model, score or loss.

        The call itself does not trace again. The arguments are those of `advance`, the state's
        shapes in place of its arrays.
        """
        if feed is None:
            self.steps(self.task.train.steps_of_call(step)).trace(state, given)
        else:
            self.step.trace(state, batches_of_step(self.task, feed, step), given)

    def advance(
        self, state: TrainState, step: int, count: int, feed: Feed | None, given: Any
    ) -> tuple[TrainState, Metrics, int | None]:
        """`count` steps in one call; or with a feed one call per step, for the host makes the next.

        Args:
            state: its arrays are deleted.
            step: of the state.
            count: steps to do.
            feed: from `Task.feed`.
            given: the `Hyperparameters`, or None.

        Returns:
            the state; the means of the metrics over the steps; and the tokens of the batches of one
            seed, padding included, None if the batches do not tell.
        """
        if feed is None:
            state, metrics = self.steps(count)(state, given)
            tokens = _drawn_tokens(self)
            return state, metrics, tokens and count * tokens
        by_step, sizes = [], []
        for each in range(step, step + count):
            batches = batches_of_step(self.task, feed, each)
            state, metrics = self.step(state, batches, given)
            by_step.append(metrics)
            sizes.append(num_tokens(jax.tree.map(lambda leaf: leaf[0], batches)))
        means = jax.tree.map(lambda *steps: np.mean(np.stack(steps), axis=0), *by_step)
        known = [size for size in sizes if size is not None]
        return state, means, sum(known) if len(known) == count else None


def num_tokens(batch: Any) -> int | None:
    """The positions of a batch of one seed, padding included; None if the batch does not tell."""
    size: int | None = getattr(batch, "num_tokens", None)
    return size


def _jitted(compiled: Compiled, function: Any, *count: int) -> Any:
    """`jax.jit` of a function of one seed, mapped over seeds."""
    build = _shared if compiled.key else _shared.__wrapped__
    return build(compiled, function, *count)


@functools.lru_cache(maxsize=32)
def _shared(compiled: Compiled, function: Any, *count: int) -> Any:
    layout, one_seed = compiled.layout, functools.partial(function, compiled.task, *count)
    by_seed, replicated = (layout.by_seed, layout.replicated) if layout else (None, None)
    if function is _first_state:
        return jax.jit(jax.vmap(one_seed), out_shardings=by_seed)
    if function is _statistics:
        return jax.jit(jax.vmap(one_seed), out_shardings=replicated)
    axes = (0, None) if function is train_steps else (0, 0, None)
    one_seed = functools.partial(one_seed, layout=layout)
    steps = jax.vmap(one_seed, in_axes=axes, spmd_axis_name="seed")
    return jax.jit(steps, donate_argnums=0, out_shardings=layout and (by_seed, replicated))


@functools.lru_cache(maxsize=32)
def _drawn_tokens(compiled: Compiled) -> int | None:
    return num_tokens(drawn_shapes(compiled.task))
