"""Small models learn a task together: deviations, rates and seeds are one axis of one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import capture
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
        gain: what the score's own kernels are multiplied by at the start.
    """

    factor: float
    rate: float
    seed: int
    gain: float = 1.0


def with_score(task: Any, score: str) -> Any:
    """The task with this score, times a constant factor, in all attentions of its model."""
    attends: Any = {"score": TIMES.format(score), "self_attention_score": None}  # the same
    return dataclasses.replace(task, model=dataclasses.replace(task.model, **attends))


def deviation_of(task: Any, gain: float = 1.0) -> float:
    """The deviation of the logits within a row, in the initial model with factor 1.

    It is the root of the mean square of e_ij - mean_j e_ij over all attentions, 4 seeds and a batch
    of 64 examples; i are the queries of the second half of the tokens, j the keys of the first
    half, so that a causal mask hides no pair.

    Raises:
        ValueError: the logits of a row are all equal, or not finite; no factor gives them another
            deviation.
    """
    params = changed(states(task, range(_SEEDS)).params, 1.0, gain)
    batch = task.batch(jax.random.key(0), size=_EXAMPLES)

    @jax.jit
    @jax.vmap
    def squares(params: Any) -> list[Array]:
        attentions = capture(task.bind(params), *batch.inputs).attentions
        return [_square_within_rows(each.logits) for each in attentions.values()]

    deviation = float(np.sqrt(np.mean(squares(params))))
    if not 0 < deviation < np.inf:  # also NaN
        text = f"score {task.model.score} must give the keys different, finite logits at the start"
        raise ValueError(f"{text}; got a deviation of {deviation}")
    return deviation


def _square_within_rows(logits: Any) -> Array:
    queries, keys = logits.shape[-2:]
    block = logits[..., queries // 2 :, : keys // 2]
    return jnp.mean(jnp.square(block - block.mean(-1, keepdims=True)))


def states(task: Any, seeds: Sequence[int]) -> TrainState:
    """The initial states of consecutive seeds, stacked."""
    train = dataclasses.replace(task.train, first_seed=seeds[0], seeds=len(seeds))
    return initial_state(AtRate(dataclasses.replace(task, train=train), 1.0))


def changed(params: Any, factor: Any, gain: Any = 1.0) -> Any:
    """Parameters in which each score's factor is `factor`, and its own kernels times `gain`."""

    def change(path: Any, leaf: Array) -> Array:
        names = [getattr(entry, "key", None) for entry in path]
        if names[-2:] == ["params_of_score", "factor"]:
            return jnp.broadcast_to(jnp.asarray(factor, leaf.dtype), leaf.shape)
        is_kernel = names[-2:-1] == ["score"] and "kernel" in str(names[-1])
        return leaf * jnp.asarray(gain, leaf.dtype) if is_kernel else leaf

    return jax.tree_util.tree_map_with_path(change, params)


def started(task: Any, seeds: Any, factors: Any, gains: Any) -> TrainState:
    """The initial states of these seeds, in any order, `changed` by a factor and a gain each."""
    found = states(task, range(min(seeds), max(seeds) + 1))
    state = jax.tree.map(lambda leaf: leaf[np.array(seeds) - min(seeds)], found)
    return state._replace(params=jax.vmap(changed)(state.params, factors, gains))


@functools.cache
def _look(task: Any) -> Any:
    """The compiled program of LOOK steps of all trainings: (states, rates) -> states, metrics."""
    one = lambda state, rate: train_steps(AtRate(task, rate), LOOK, state)  # noqa: E731
    return jax.jit(jax.vmap(one), donate_argnums=0)


def steps_until_solved(
    task: Any, starts: Sequence[Start], steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Trains all of `starts` at once, until all have solved the task or `steps` are done.

    Returns:
        the steps after which each had first solved it, [n], infinite for never; and the accuracy
        of each in the last look, [n], 0 for NaN.
    """
    factors, gains = (np.array([getattr(s, name) for s in starts]) for name in ("factor", "gain"))
    state = started(task, [start.seed for start in starts], factors, gains)
    rates, advance = jnp.array([start.rate for start in starts]), _look(task)
    solved, accuracy = np.full(len(starts), np.inf), np.zeros(len(starts))
    for step in range(LOOK, steps + 1, LOOK):
        state, metrics = advance(state, rates)
        accuracy = np.nan_to_num(np.asarray(metrics["accuracy"], np.float64))
        solved = np.where((accuracy >= SOLVED) & np.isinf(solved), step, solved)
        if np.isfinite(solved).all():
            break
    return solved, accuracy
