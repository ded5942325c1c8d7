"""Which number at initialisation predicts where a score learns recall? Three candidates.

The second layer of a model that recalls must find the earlier place of a token: of all keys, the
one that equals the query needs the largest logit. Each candidate asks how fast an attention can
learn this from its initial parameters, without any model around it:

    e_ab = factor score(Wq x_a, Wk x_b),   m = mean_a (e_aa - mean_b e_ab)

x are 31 random tokens, as many as recall has keys, with 64 features of mean 0 and variance 1, as
after a layer normalisation. Wq, Wk and the score's parameters theta are those of the attention of
the models in `maps.py`. The factor is a constant: it gives the logits a deviation of 1/4 within
rows, in the middle of the region in which scaled dot learns. The margin m is in nats.

All parameters move by sign steps: theta + rate * sign(dm / dtheta). Adam's first step has this
form, because it divides each gradient by its own size. The candidates are

1. gain, P1 = sum |dm / dtheta| over all entries of Wq, Wk and the score's parameters: by how much
   one sign step of a small rate moves the margin, over the rate.
2. signal, P2: the same step at rate 0.003, the middle rate of the maps, moves the logits by d_ab.
   P2 = mean_a (d_aa - mean_b d_ab) / s, where s is the root of the mean square of
   d_ab - mean_(c != a) d_ac over b != a: the noise that the step adds to the other logits.
3. steps, P3: how many such steps, with a new gradient at each, give the equal token a softmax
   weight of 0.9, the mean over a; 1,000 for those that need more, or that never do.

`PREDICTIONS` and `LEAST_GAIN` were written before these numbers were seen beside any map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_jax.core.checks import check_integer
from attention_jax.nn import MultiHeadAttention
from attention_jax.nn.parameters import values_of
from attention_jax.scores import Score, get_score
from experiments import lab
from experiments.lab import Row

TOKENS, DIM = 31, 64
DEVIATION, RATE, FOUND, MOST_STEPS = 0.25, 0.003, 0.9, 1000
Array = jax.Array


class Prediction(NamedTuple):
    """A bound on a rank correlation over the different scores, with the area of their maps.

    The area is the share of the trainings of a map that solve recall: all its deviations, rates and
    seeds.

    Attributes:
        number: the name of the number in a row of `at_initialisation`.
        sign: -1 if a smaller number means a larger area.
        low: the correlation of sign times the number with the area is at least this.
    """

    number: str
    sign: int
    low: float


PREDICTIONS = (Prediction("steps", -1, 0.7), Prediction("gain", 1, 0.5))
# The first of these scores has the smallest gain of all.
LEAST_GAIN = ("additive", "general", "scaled", "l2", "hyperbolic", "manhattan", "cosine")


def at_initialisation(score: str, seeds: int = 4) -> Row:
    """What an attention with this score can learn about equal tokens, as means over seeds.

    Args:
        score: as in `get_score`.
        seeds: number of draws of tokens and parameters, at least 1.

    Returns:
        {"own": the deviation of the logits within rows with factor 1; "pair_share": the share of
        their variance within rows that depends on the pair, that of c in e_ab = r_a + k_b + c_ab;
        "gain": P1; "signal": P2; "steps": P3}.

    Raises:
        ValueError: there is no such score, or `seeds` is below 1.
    """
    check_integer("seeds", seeds)
    function = get_score(score)
    draws = [_draw(function, seed) for seed in range(seeds)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws)
    numbers = jax.jit(jax.vmap(lambda x, params: numbers_of(function, x, params)))(*stacked)
    return {name: lab.significant(np.mean(values)) for name, values in numbers.items()}


def _draw(score: Score, seed: int) -> tuple[Array, Any]:
    """Tokens [TOKENS, DIM] and the parameters (Wq, Wk, those of the score) of a new attention."""
    module = MultiHeadAttention(score, DIM, num_heads=1, rngs=nnx.Rngs(seed))
    x = jax.random.normal(jax.random.key(seed), (TOKENS, DIM))
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    kernels = [projection.kernel[...][:, 0] for projection in (module.query, module.key)]
    own = jax.tree.map(lambda leaf: leaf[0], values_of(module.params_of_score))
    return x, (*kernels, own)


def numbers_of(score: Score, x: Array, params: Any) -> dict[str, Any]:
    """The numbers of `at_initialisation` for tokens [A, D] and parameters (Wq, Wk, the score's)."""

    def table(params: Any) -> Array:
        query_kernel, key_kernel, own = params
        return score(own, x @ query_kernel, x @ key_kernel)

    within = within_rows(table(params))
    deviation = jnp.sqrt(jnp.mean(jnp.square(within)))
    pairs = within - within.mean(0, keepdims=True)
    factor = DEVIATION / deviation
    slopes = jax.grad(lambda params: margin(factor * table(params)))

    def step(params: Any) -> Any:
        return jax.tree.map(lambda p, slope: p + RATE * jnp.sign(slope), params, slopes(params))

    def is_searching(state: Any) -> Array:
        weights = jnp.diagonal(jax.nn.softmax(factor * table(state[0])))
        return (state[1] < MOST_STEPS) & ~(weights.mean() >= FOUND)  # NaN finds nothing

    change = factor * (table(step(params)) - table(params))
    _, steps = jax.lax.while_loop(is_searching, lambda s: (step(s[0]), s[1] + 1), (params, 0))
    return {
        "own": deviation,
        "pair_share": jnp.mean(jnp.square(pairs)) / jnp.mean(jnp.square(within)),
        "gain": sum(jnp.abs(slope).sum() for slope in jax.tree.leaves(slopes(params))),
        "signal": margin(change) / noise(change),
        "steps": steps,
    }


def within_rows(logits: Array) -> Array:
    """What softmax sees of logits [A, B]: e_ab - mean_b e_ab."""
    return logits - logits.mean(-1, keepdims=True)


def margin(logits: Array) -> Array:
    """m = mean_a (e_aa - mean_b e_ab) of logits [A, A]."""
    return jnp.diagonal(within_rows(logits)).mean()


def noise(change: Array) -> Array:
    """s: the deviation within rows of a table [A, A] without its diagonal."""
    others = change.reshape(-1)[1:].reshape(len(change) - 1, -1)[:, :-1].reshape(len(change), -1)
    return jnp.sqrt(jnp.mean(jnp.square(within_rows(others))))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: that of the ranks, where equal numbers share their mean rank.

    It is NaN if all numbers of a sequence are equal.
    """
    a, b = (ranks - ranks.mean() for ranks in map(_ranks, (first, second)))
    squares = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / squares if squares else float("nan")


def _ranks(numbers: Sequence[float]) -> np.ndarray:
    """The rank of each number, from 1; equal numbers have the mean of their ranks."""
    array = np.asarray(numbers, np.float64)
    below = (array[:, None] > array).sum(1)
    return below + ((array[:, None] == array).sum(1) + 1) / 2
