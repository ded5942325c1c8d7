"""Weights of monotonic attention: where walks over the keys stop, given choosing probabilities.

The walk of query i starts at the key where that of query i-1 stopped, and stops at key j with the
choosing probability p_ij. The soft form, the expectation over all walks, is differentiable. The
hard form follows one walk, which stops at the first key with p_ij >= 1/2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, any_array, integer_array, pad_rank
from attention_jax.core.meshes import varying_as
from attention_jax.functional.checks import check_axes, checked_floats

Array = jax.Array


def monotonic_weights(probabilities: Array, initial: Array | None = None) -> Array:
    """The probability that query i stops at key j: the expected weights of monotonic attention.

        alpha_ij = p_ij sum_{k <= j} alpha_{i-1,k} prod_{l=k}^{j-1} (1 - p_il)
                 = p_ij q_ij,    q_ij = (1 - p_{i,j-1}) q_{i,j-1} + alpha_{i-1,j}

    A walk that passes the last key stops at no key, and later queries do not continue it. So rows
    sum to at most 1, and no row sums to more than the row before it.

    The queries are computed in order. Over the keys an associative scan computes the recurrence of
    q directly, in log2(S) steps. The paper's closed form, a cumulative sum divided by a cumulative
    product of 1 - p, is not used: that product underflows, and clipping it gives wrong weights.

    Args:
        probabilities: float [*B, T, S], p, in [0, 1]. A call outside of `jax.jit` and other
            transformations checks the range. NaN is allowed; it reaches the weights of its own and
            later keys in its own and later rows.
        initial: float broadcastable to [*B, S], the weights of the query before the first, from
            which to continue; None for all the weight on the first key.

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
    """The key at which each query stops if it stops at the first key with p >= 1/2.

        t_i = min {j >= t_{i-1} : p_ij >= 1/2},    S if no key qualifies

    A query without such a key attends to nothing, since its walk passes the last key, and so do all
    later queries. (The paper's Algorithm 1 gives such a query a context of zeros and does not
    define where the next query starts. Its expected weights, and TensorFlow's "hard" mode, end the
    walk. So both forms agree wherever all p are 0 or 1.)

    Args:
        probabilities: float [*B, T, S], p in [0, 1], checked as in `monotonic_weights`; or bool,
            the choices p >= 1/2. NaN counts as not chosen (positions cannot be NaN; weights are).
        start: int broadcastable to *B, from 0 to S: the key of the query before the first; S if it
            attended to nothing.

    Returns:
        positions int32 [*B, T]; S where a query attends to nothing. They have no gradient.

    Raises:
        ValueError: an argument has the wrong shape or dtype, or a probability is not in [0, 1].

    >>> p = jnp.array([[0.0, 0, 0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0.5, 0, 0]])
    >>> hard_monotonic_positions(p)
    Array([3, 5], dtype=int32)

    Source: Raffel et al. 2017, Algorithm 1 (their t_i), with z_ij = 1 where p_ij >= 1/2 in place of
        a Bernoulli draw, as in their section 2.2 at test time.
    """
    choices = any_array("probabilities", probabilities)
    if choices.dtype != jnp.bool_:
        choices = _checked_probabilities(choices) >= 0.5
    check_axes("probabilities", choices, ("T", "S"), None)
    batch_shape, source_length = choices.shape[:-2], choices.shape[-1]
    first = check_axes("start", integer_array("start", start), (), batch_shape)
    keys = pad_rank(jnp.arange(source_length, dtype=jnp.int32), choices.ndim - 1)

    def next_query(position: Array, choices: Array) -> tuple[Array, Array]:
        stops = jnp.where(choices & (keys >= position[..., None]), keys, source_length)
        position = jnp.min(stops, axis=-1, initial=source_length)
        return position, position

    first = jnp.broadcast_to(first.astype(jnp.int32), batch_shape)
    first, choices = varying_as((first, choices), first, choices)
    _, positions = jax.lax.scan(next_query, first, jnp.moveaxis(choices, -2, 0))
    return jnp.moveaxis(positions, 0, -1)


def hard_monotonic_weights(probabilities: Array, start: Array | int = 0) -> Array:
    """The one-hot weights of `hard_monotonic_positions`.

        alpha_ij = [j = t_i]

    Args:
        probabilities, start: as in `hard_monotonic_positions`.

    Returns:
        weights [*B, T, S] in the dtype of `probabilities`, float32 if that is bool; a row is all
        zeros where the query attends to nothing. They have no gradient. A row whose walk meets a
        NaN is NaN, and so are all later rows.

    Raises:
        ValueError: an argument has the wrong shape or dtype, or a probability is not in [0, 1].

    >>> hard_monotonic_weights(jnp.array([[0.25, 0.75, 1.0], [0.0, 0.25, 0.25]])).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]

    Source: Raffel et al. 2017, Algorithm 1.
    """
    positions = hard_monotonic_positions(probabilities, start)
    probabilities = jnp.asarray(probabilities)  # checked by `hard_monotonic_positions`
    dtype = jnp.float32 if probabilities.dtype == jnp.bool_ else probabilities.dtype
    length = probabilities.shape[-1]
    # Position S, no key, is out of range and gives a row of zeros.
    weights = jax.nn.one_hot(positions, length, dtype=dtype)
    if probabilities.dtype == jnp.bool_:
        return weights
    first = jnp.broadcast_to(jnp.asarray(start, jnp.int32), positions.shape[:-1])[..., None]
    earlier = jnp.concatenate([first, positions], axis=-1)[..., :-1]
    keys = pad_rank(jnp.arange(length, dtype=jnp.int32), weights.ndim)
    passed = (earlier[..., None] <= keys) & (keys < positions[..., None])
    unknown = jnp.any(passed & jnp.isnan(probabilities), axis=-1)
    unknown = jnp.cumsum(unknown, axis=-1)[..., None] > 0  # so are all later rows
    return jnp.where(unknown, jnp.nan, weights)


# --- the expectation ---


def expected_weights(probabilities: Array, initial: Array) -> Array:
    """`monotonic_weights` for arguments that are already checked, broadcast and cast."""
    probabilities, initial = varying_as((probabilities, initial), probabilities, initial)

    def compose(first: Any, second: Any) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def next_query(previous: Array, p: Array) -> tuple[Array, Array]:
        # The walk reaches key j, with the probability q_j, if it passes key j - 1 or starts at j:
        # q_j = (1 - p_(j-1)) q_(j-1) + previous_j. An associative scan composes these maps of q in
        # log2(S) steps. No walk reaches the first key by passing another.
        passing = jnp.concatenate([jnp.zeros_like(p[..., :1]), 1 - p[..., :-1]], axis=-1)
        maps = passing, previous
        weights = p * jax.lax.associative_scan(compose, maps, axis=p.ndim - 1)[1]
        return weights, weights

    _, weights = jax.lax.scan(next_query, initial, jnp.moveaxis(probabilities, -2, 0))
    return jnp.moveaxis(weights, 0, -2)


# --- checks of the arguments ---


def _checked_probabilities(probabilities: Any) -> Array:
    """Float [*B, T, S]; ValueError for another shape or dtype, or values outside [0, 1]."""
    probabilities = checked_floats("probabilities", probabilities, ("T", "S"), None)
    # A traced array has no values yet, and a process may hold only a part of a distributed array.
    if not isinstance(probabilities, jax.core.Tracer) and probabilities.is_fully_addressable:
        numbers = np.asarray(probabilities)
        rounding = 4 * float(jnp.finfo(probabilities.dtype).eps)
        outside = (numbers < -rounding) | (numbers > 1 + rounding)
        if outside.any():
            raise ValueError(
                f"probabilities must be in [0, 1]; got {float(numbers[outside][0]):g} (for logits,"
                " pass jax.nn.sigmoid(logits))"
            )
    return probabilities


def checked_initial(initial: Any, batch_shape: tuple[int, ...], source_length: int) -> Array:
    """Initial weights [..., S], with axes that broadcast to *B; None: all on the first key."""
    if initial is None:
        return jnp.asarray(jnp.arange(source_length) == 0, jnp.float32)
    return checked_floats("initial", initial, (source_length,), batch_shape)
