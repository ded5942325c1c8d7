"""Small models learn a task together: deviations, rates and seeds are one axis of one program."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import capture, logit_size
from attention_jax.training.step import TrainState, initial_state, train_steps
from experiments.reversal.arms import AtRate

LOOK = 50  # steps between two measurements of the accuracy
SOLVED = 0.9  # of the answers of LOOK batches, each before it is learned
TIMES = "experiments.reversal.multiplied_scores:Times(score={})"
_SEEDS, _EXAMPLES = 4, 64  # that a deviation is measured with
Array = jax.Array


class Start(NamedTuple):
    """How one training begins.

    Attributes:
        factor: constant factor of the logits.
        rate: Adam's learning rate, which stays constant.
        seed: of the initial parameters and the batches.
    """

    factor: float
    rate: float
    seed: int


def with_score(task: Any, score: str) -> Any:
    """The task with this score, times a constant factor, in all attentions of its model."""
    attends: Any = {"score": TIMES.format(score), "self_attention_score": None}  # the same
    return dataclasses.replace(task, model=dataclasses.replace(task.model, **attends))


def deviation_of(task: Any) -> float:
    """The deviation of the logits within a row, in the initial model with factor 1.

    It is the root of the mean square of e_ij - mean_j e_ij over all attentions, 4 seeds and a batch
    of 64 examples; i are the queries of the second half of the tokens, j the keys of the first
    half, so that a causal mask hides no pair.

    Raises:
        ValueError: the logits of a row are all equal, or not finite; no factor gives them another
            deviation.
    """
    deviation = float(np.sqrt(np.mean(_of_blocks(task, _square_within_rows))))
    if not 0 < deviation < np.inf:  # also NaN
        text = f"score {task.model.score} must give the keys different, finite logits at the start"
        raise ValueError(f"{text}; got a deviation of {deviation}")
    return deviation


def query_share_of(task: Any) -> float:
    """The share of the variance of the same logits that depends on the query; see `logit_size`.

    It is a mean over the attentions and seeds, weighted by the variance.
    """

    def size(block: Array) -> tuple[Array, Array]:
        found = logit_size(block, axis=(*range(block.ndim - 2),))
        return found.deviation**2, found.deviation**2 * found.query_share

    every, of_query = np.asarray(_of_blocks(task, size), np.float64).sum((0, 2))
    return float(of_query / every)


def _of_blocks(task: Any, measure: Any) -> list[Any]:
    """What `measure` says of the logits of each attention, [seeds]; see `deviation_of`."""
    batch = task.batch(jax.random.key(0), size=_EXAMPLES)

    @jax.jit
    @jax.vmap
    def of_each(params: Any) -> list[Any]:
        attentions = capture(task.bind(params), *batch.inputs).attentions
        return [measure(_block(each.logits)) for each in attentions.values()]

    return of_each(states(task, range(_SEEDS)).params)


def _block(logits: Any) -> Array:
    queries, keys = logits.shape[-2:]
    block: Array = logits[..., queries // 2 :, : keys // 2]
    return block


def _square_within_rows(block: Array) -> Array:
    return jnp.mean(jnp.square(block - block.mean(-1, keepdims=True)))


def states(task: Any, seeds: Sequence[int]) -> TrainState:
    """The initial states of consecutive seeds, stacked."""
    train = dataclasses.replace(task.train, first_seed=seeds[0], seeds=len(seeds))
    return initial_state(AtRate(dataclasses.replace(task, train=train), 1.0))


def started(task: Any, seeds: Any, factors: Any) -> TrainState:
    """The initial states of these seeds, in any order, each with its score's factor."""

    def with_factor(path: Any, leaf: Array) -> Array:
        names = [getattr(entry, "key", None) for entry in path]
        if names[-2:] != ["params_of_score", "factor"]:
            return leaf
        of_seed = jnp.asarray(factors, leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.broadcast_to(of_seed, leaf.shape)

    found = states(task, range(min(seeds), max(seeds) + 1))
    state = jax.tree.map(lambda leaf: leaf[np.array(seeds) - min(seeds)], found)
    params = jax.tree_util.tree_map_with_path(with_factor, state.params)
    return state._replace(params=params)


@functools.cache
def _look(task: Any) -> Any:
    """The compiled program of LOOK steps of all trainings: (states, rates) -> states, metrics."""
    one = lambda state, rate: train_steps(AtRate(task, rate), LOOK, state)  # noqa: E731
    return jax.jit(jax.vmap(one), donate_argnums=0)


def steps_until_solved(
    task: Any, starts: Sequence[Start], steps: int, together: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Trains all of `starts`, each until it has solved the task or `steps` are done.

    Args:
        task: the task, with its score.
        starts: how each training begins.
        steps: the most steps of a training, a multiple of `LOOK`.
        together: how many train at once; the next one takes the place of one that has ended. None:
            two on a CPU, where more are no faster, and all elsewhere.

    Returns:
        the steps after which each had first solved it, [n], infinite for never; and the accuracy
        of each in its last look, [n], 0 for NaN.
    """
    at_once = 2 if jax.default_backend() == "cpu" else len(starts)
    waiting = [*range(len(starts))]
    places = [waiting.pop(0) for _ in range(min(together or at_once, len(starts)))]
    first = started(task, [start.seed for start in starts], [start.factor for start in starts])
    rates, advance = jnp.array([start.rate for start in starts]), _look(task)
    solved, accuracy = np.full(len(starts), np.inf), np.zeros(len(starts))
    done, training = np.zeros(len(starts), int), {*places}
    state = jax.tree.map(lambda leaf: leaf[np.array(places)], first)
    while training:
        state, metrics = advance(state, rates[np.array(places)])
        right = np.nan_to_num(np.asarray(metrics["accuracy"], np.float64))
        for place, index in enumerate(places):
            if index not in training:
                continue
            done[index] += LOOK
            accuracy[index] = right[place]
            if right[place] >= SOLVED:
                solved[index] = done[index]
            elif done[index] < steps:
                continue
            training.remove(index)
            if waiting:
                places[place] = waiting.pop(0)
                training.add(places[place])
                put = functools.partial(_put, place, places[place])
                state = jax.tree.map(put, state, first)
    return solved, accuracy


def _put(place: int, index: int, leaf: Array, first: Array) -> Array:
    return leaf.at[place].set(first[index])
