"""A training step, and the compiled calls of many steps and seeds. They know no model and no task.

`train_step` is one step of one seed. A compiled call scans it over steps and maps it over seeds;
`Compiled` has the calls of a run.
"""

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
    task: Task,
    state: TrainState,
    batch: Any,
    rng: Array,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[TrainState, Metrics]:
    """One step of one seed.

    Args:
        task: the task.
        state: of the seed.
        batch: from `Task.batch` or a feed.
        rng: for dropout.
        optimizer: None for `Task.optimizer`.
    """
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    (loss, metrics), dparams = gradient(state.params, batch, rng)
    optimizer = task.optimizer() if optimizer is None else optimizer
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
    hyperparameters: Hyperparameters | None = None,
    *,
    layout: Layout | None = None,
) -> tuple[TrainState, Metrics]:
    """`count` steps of one seed of a task that draws its batches; metrics are means over them.

    The batch and the dropout of a step depend on (seed, step) alone, so that a run can stop and
    resume at any step. With hyperparameters, these take the place of the task's, which would be
    constants. With a layout, each device draws its own part of the batch.
    """

    def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        return _step(task, state, None, hyperparameters, layout=layout)

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
    hyperparameters: Hyperparameters | None,
    *,
    layout: Layout | None,
) -> tuple[TrainState, Metrics]:
    """One step of one seed with a batch from the host; None for a task that draws its batches."""
    layout = layout or Layout()
    batch = layout.constrained(_batch_of_step(task, state, batch), "data")
    optimizer = None
    if hyperparameters is not None:
        optimizer = task.train.transformation(hyperparameters)
    state, metrics = train_step(task, state, batch, _rng_of_step(state, "loss"), optimizer)
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
    state: TrainState = _first_states(task, layout)(seeds_of(task), params)
    return state


def _first_states(task: Task, layout: Layout | None) -> Any:
    """(seeds, params or None) -> the initial state, compiled."""
    first_state = jax.vmap(functools.partial(_first_state, task))
    return jax.jit(first_state, out_shardings=layout and layout.by_seed)


def state_shapes(task: Task) -> TrainState:
    """The shapes and dtypes of `initial_state`, computed without its arrays."""
    shapes: TrainState = _first_states(task, None).eval_shape(seeds_of(task), None)
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

    def one_seed(state: TrainState, batch: Any) -> Metrics:
        rng = _rng_of_step(state, "loss")
        return task.statistics(task.loss, state.params, _batch_of_step(task, state, batch), rng)

    return jax.vmap(one_seed)(state, batches)


# --- compiled ---


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled calls of a run; all seeds are stacked.

    Attributes:
        task: the task.
        layout: the devices.
        program_key: runs with equal keys share their calls: what is traced and compiled for one
            serves the others, if shapes are equal. From `identity.program_key`.
    """

    task: Task = dataclasses.field(compare=False)
    layout: Layout
    program_key: str

    @property
    def first_state(self) -> Any:
        """(seeds, params or None) -> the initial state."""
        return _jit_first_state(self)

    @functools.cached_property
    def statistics(self) -> Any:
        """(state, batches) -> `gradient_statistics`; never shared: the key does not know them."""
        statistics = functools.partial(gradient_statistics, self.task)
        return jax.jit(statistics, out_shardings=self.layout.replicated)

    def trace(self, state: Any, step: int, feed: Feed | None, hyperparameters: Any) -> Any:
        """Traces the call after a step, for the errors of a model, score or loss.

        The call itself does not trace again, nor compile what has been compiled from this, unless
        more than 256 programs came between.

        Args:
            state: the shapes of the state; the others are those of `advance`.

        Returns:
            a `jax.stages.Traced`.
        """
        if feed is None:
            count = self.task.train.steps_of_call(step)
            return _jit_steps(self, count).trace(state, hyperparameters)
        batches = batches_of_step(self.task, feed, step)
        return _jit_steps(self, None).trace(state, batches, hyperparameters)

    def advance(
        self, state: TrainState, step: int, count: int, feed: Feed | None, hyperparameters: Any
    ) -> tuple[TrainState, Metrics, int | None]:
        """`count` steps in one call; or with a feed one call per step, for the host makes the next.

        Args:
            state: its arrays are deleted.
            step: of the state.
            count: steps to do.
            feed: from `Task.feed`.
            hyperparameters: arguments of the program, or None.

        Returns:
            the state; the means of the metrics over the steps; and the tokens of the batches of one
            seed, padding included, None if the batches do not tell.
        """
        if feed is None:
            state, metrics = _jit_steps(self, count)(state, hyperparameters)
            return state, metrics, self._drawn_tokens and count * self._drawn_tokens
        by_step, sizes = [], []
        for each in range(step, step + count):
            batches = batches_of_step(self.task, feed, each)
            state, metrics = _jit_steps(self, None)(state, batches, hyperparameters)
            by_step.append(metrics)
            sizes.append(num_tokens(jax.tree.map(lambda leaf: leaf[0], batches)))
        means = jax.tree.map(lambda *steps: np.mean(np.stack(steps), axis=0), *by_step)
        known = [size for size in sizes if size is not None]
        return state, means, sum(known) if len(known) == count else None

    @functools.cached_property
    def _drawn_tokens(self) -> int | None:
        return num_tokens(drawn_shapes(self.task))


@functools.lru_cache(maxsize=256)
def _jit_first_state(compiled: Compiled) -> Any:
    return _first_states(compiled.task, compiled.layout)


@functools.lru_cache(maxsize=256)
def _jit_steps(compiled: Compiled, count: int | None) -> Any:
    """(state, hyperparameters) -> (state, mean metrics), after `count` steps.

    For None: (state, batches, hyperparameters) -> (state, metrics), after a step with batches from
    the host.
    """
    task, layout = compiled.task, compiled.layout
    one_seed: Any = functools.partial(_step, task, layout=layout)
    if count is not None:
        one_seed = functools.partial(train_steps, task, count, layout=layout)
    axes = (0, 0, None) if count is None else (0, None)
    all_seeds = jax.vmap(one_seed, in_axes=axes, spmd_axis_name="seed")
    shardings = (layout.by_seed, layout.replicated)
    return jax.jit(all_seeds, donate_argnums=0, out_shardings=shardings)


def num_tokens(batch: Any) -> int | None:
    """The positions of a batch of one seed, padding included; None if the batch does not tell."""
    size: int | None = getattr(batch, "num_tokens", None)
    return size
