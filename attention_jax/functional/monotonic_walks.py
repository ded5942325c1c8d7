"""Where walks over the keys stop, given the probability that each stops at each key.

Query i walks over the keys from where query i-1 stopped and stops at key j with the choosing
probability p_ij. The expectation over all walks is soft and can be differentiated; the hard form
takes one walk, that of the likelier choices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, any_array, float_array, integer_array
from attention_jax.core.varying import varying_as
from attention_jax.pairwise.position_functions import broadcasts

Array = jax.Array


def monotonic_weights(probabilities: Array, initial: Array | None = None) -> Array:
    """The probability that query i stops at key j: the expected weights of monotonic attention.

        alpha_ij = p_ij sum_{k <= j} alpha_{i-1,k} prod_{l=k}^{j-1} (1 - p_il)
                 = p_ij q_ij,    q_ij = (1 - p_{i,j-1}) q_{i,j-1} + alpha_{i-1,j}

    A walk that passes the last key has stopped nowhere, and later queries do not take it up: rows
    sum to at most 1, and no row to more than the one before it.

    The queries come one after another. Over the keys an associative scan computes the recurrence of
    q as it is written, in log2(S) steps. The paper's closed form, a cumulative sum divided by a
    cumulative product of 1 - p, is not used: that product underflows, and clipping it makes the
    weights wrong.

    Args:
        probabilities: float [*B, T, S], p, in [0, 1]. A call outside of `jax.jit` and other
            transformations checks the range; NaN passes, and reaches the keys at and after its own,
            in its row and in later rows.
        initial: float broadcastable to [*B, S], the weights of the query before the first, to go on
            from; None for all the weight on the first key.

    Returns:
        weights [*B, T, S] in the dtype of `probabilities` (computed in at least float32);
        differentiable in any mode and order.

    Raises:
        ValueError: an argument has the wrong shape or dtype, or a probability is not in [0, 1].

    >>> monotonic_weights(jnp.array([[0.5, 0.5, 1.0], [0.0, 0.5, 1.0]])).tolist()
    [[0.5, 0.25, 0.25], [0.0, 0.375, 0.625]]

    Source: Raffel et al. 2017, "Online and Linear-Time Attention by Enforcing Monotonic
        Alignments", section 2.3 (their p, q and alpha; their T is our S, their U our T).
    """
    probabilities = _checked_probabilities(probabilities)
    *batch_shape, _, source_length = probabilities.shape
    initial = checked_initial(initial, tuple(batch_shape), source_length)
    dtype = accumulator_dtype(probabilities)
    initial = jnp.broadcast_to(initial, (*batch_shape, source_length))
    weights = expected_weights(probabilities.astype(dtype), initial.astype(dtype))
    return weights.astype(probabilities.dtype)


def hard_monotonic_positions(probabilities: Array, start: Array | int = 0) -> Array:
    """Where each query stops when it takes the first key that is likelier chosen than not.

        t_i = min {j >= t_{i-1} : p_ij >= 1/2},    S if there is none

    A query that finds no key attends to nothing, and its walk has passed the last key: so do all
    later ones. (The paper's Algorithm 1 gives such a query a context of zeros and does not say
    where the next begins. Its expected weights do, for there such a walk is lost, and TensorFlow's
    "hard" mode does the same: so both forms agree wherever all p are 0 or 1.)

    Args:
        probabilities: float [*B, T, S], p in [0, 1], checked as in `monotonic_weights`; or bool,
            the choices p >= 1/2. NaN is not chosen.
        start: int broadcastable to *B, from 0 to S: the position of the query before the first; S
            if it attended to nothing.

    Returns:
        positions int32 [*B, T]; S where a query attends to nothing. No gradient passes.

    Raises:
        ValueError: an argument has the wrong shape or dtype, or a probability is not in [0, 1].

    >>> p = jnp.array([[0.0, 0, 0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0.5, 0, 0]])
    >>> hard_monotonic_positions(p)
    Array([3, 5], dtype=int32)

    Source: Raffel et al. 2017, Algorithm 1 (their t_i), with z_ij = 1 where p_ij >= 1/2 in place of
        a Bernoulli draw, as in their section 2.2 at test time.
    """
    choices = _checked_choices(probabilities)
    batch_shape, source_length = choices.shape[:-2], choices.shape[-1]
    start = integer_array("start", start)
    if not broadcasts(start.shape, batch_shape):
        raise ValueError(f"start must broadcast to {list(batch_shape)}; got {list(start.shape)}")

    # The first choice at or after each key, and one column more for walks that have ended.
    keys = jnp.arange(source_length, dtype=jnp.int32)
    keys = keys.reshape((1,) * (choices.ndim - 1) + keys.shape)
    found = jnp.where(choices, keys, source_length)
    found = jax.lax.cummin(found, axis=found.ndim - 1, reverse=True)
    ended = [(0, 0)] * (found.ndim - 1) + [(0, 1)]
    found = jnp.pad(found, ended, constant_values=source_length)

    def walk(position: Array, found: Array) -> tuple[Array, Array]:
        position = jnp.take_along_axis(found, position[..., None], axis=-1)[..., 0]
        return position, position

    start = jnp.broadcast_to(start.astype(jnp.int32), batch_shape)
    start, found = varying_as((start, found), start, found)
    _, positions = jax.lax.scan(walk, start, jnp.moveaxis(found, -2, 0))
    return jnp.moveaxis(positions, 0, -1)


def hard_monotonic_weights(probabilities: Array, start: Array | int = 0) -> Array:
    """One where `hard_monotonic_positions` says, zero elsewhere.

        alpha_ij = [j = t_i]

    Args:
        probabilities, start: as in `hard_monotonic_positions`.

    Returns:
        weights [*B, T, S] in the dtype of `probabilities`, float32 if that is bool; a row is all
        zeros where the query attends to nothing. No gradient passes.

    Raises:
        ValueError: an argument has the wrong shape or dtype, or a probability is not in [0, 1].

    >>> hard_monotonic_weights(jnp.array([[0.25, 0.75, 1.0], [0.0, 0.25, 0.25]])).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]

    Source: Raffel et al. 2017, Algorithm 1.
    """
    positions = hard_monotonic_positions(probabilities, start)
    probabilities = jnp.asarray(probabilities)  # it has been checked
    dtype = jnp.float32 if probabilities.dtype == jnp.bool_ else probabilities.dtype
    # Position S, nothing, is outside, and its row zero.
    return jax.nn.one_hot(positions, probabilities.shape[-1], dtype=dtype)


# --- the expectation ---


def expected_weights(probabilities: Array, initial: Array) -> Array:
    """`monotonic_weights` of arguments that have been checked, broadcast and cast."""
    probabilities, initial = varying_as((probabilities, initial), probabilities, initial)

    def next_query(previous: Array, p: Array) -> tuple[Array, Array]:
        weights = p * _reached(p, previous)
        return weights, weights

    _, weights = jax.lax.scan(next_query, initial, jnp.moveaxis(probabilities, -2, 0))
    return jnp.moveaxis(weights, 0, -2)


def _reached(p: Array, previous: Array) -> Array:
    """q [*B, S], the probability that the walk gets to key j.

    The walk that passes key j - 1 gets to key j: q_j = (1 - p_(j-1)) q_(j-1) + previous_j. An
    associative scan composes these maps of q in log2(S) steps.
    """
    # What passes key j-1 gets to key j. Nothing comes to the first, whatever its factor.
    passing = jnp.concatenate([jnp.zeros_like(p[..., :1]), 1 - p[..., :-1]], axis=-1)

    def compose(first: Any, second: Any) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(compose, (passing, previous), axis=p.ndim - 1)[1]


# --- what came ---


def _checked_probabilities(probabilities: Any) -> Array:
    probabilities = float_array("probabilities", probabilities)
    if probabilities.ndim < 2:
        raise ValueError(f"probabilities must be [*B, T, S]; got {list(probabilities.shape)}")
    # A traced array has no numbers yet, and one spread over processes has them elsewhere.
    if not isinstance(probabilities, jax.core.Tracer) and probabilities.is_fully_addressable:
        numbers = np.asarray(probabilities)
        rounding = 4 * float(jnp.finfo(probabilities.dtype).eps)
        outside = (numbers < -rounding) | (numbers > 1 + rounding)
        if outside.any():
            raise ValueError(
                f"probabilities must be in [0, 1]; got {float(numbers[outside][0]):g} (of logits,"
                " give jax.nn.sigmoid)"
            )
    return probabilities


def _checked_choices(probabilities: Any) -> Array:
    """Bool [*B, T, S], p >= 1/2, of probabilities or of bools."""
    choices = any_array("probabilities", probabilities)
    if choices.dtype != jnp.bool_:
        return _checked_probabilities(probabilities) >= 0.5
    if choices.ndim < 2:
        raise ValueError(f"probabilities must be [*B, T, S]; got {list(choices.shape)}")
    return choices


def checked_initial(initial: Any, batch_shape: tuple[int, ...], source_length: int) -> Array:
    """Weights over S keys; their leading axes broadcast to *B."""
    if initial is None:
        return jnp.asarray(jnp.arange(source_length) == 0, jnp.float32)
    initial = float_array("initial", initial)
    shape = (*batch_shape, source_length)
    if initial.shape[-1:] != (source_length,) or not broadcasts(initial.shape, shape):
        raise ValueError(
            f"initial must be [..., {source_length}] and broadcast to {list(shape)};"
            f" got {list(initial.shape)}"
        )
    return initial
