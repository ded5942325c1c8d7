"""Monotonic attention: every query looks at one key, at or after the one before it looked at.

Query i walks over the keys from where query i-1 stopped and stops at key j with the choosing
probability p_ij. In training one takes the expectation over all walks, which is soft and can be
differentiated; in decoding it walks (the hard form). Both materialise [T, S].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.biases import Bias
from attention_jax.capture_point import capture_point, seen_from_outside
from attention_jax.checks import checked_inputs, checked_rng
from attention_jax.float_array import any_array, float_array, integer_array
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.reference import logits_and_mask
from attention_jax.masks import Mask
from attention_jax.position_functions import broadcasts
from attention_jax.scores import Params, Score, get_score
from attention_jax.softmax import accumulator_dtype

Array = jax.Array


def monotonic_weights(
    probabilities: Array, initial: Array | None = None, *, method: str = "parallel"
) -> Array:
    """The probability that query i stops at key j: the expected weights of monotonic attention.

        alpha_ij = p_ij sum_{k <= j} alpha_{i-1,k} prod_{l=k}^{j-1} (1 - p_il)
                 = p_ij q_ij,    q_ij = (1 - p_{i,j-1}) q_{i,j-1} + alpha_{i-1,j}

    A walk that passes the last key has stopped nowhere, and later queries do not take it up: rows
    sum to at most 1, and no row to more than the one before it.

    Both methods take the queries one after another and hold the recurrence over keys as it is
    written in q. The paper's closed form, a cumulative sum divided by a cumulative product of
    1 - p, is not used: that product underflows, and clipping it makes the weights wrong.

    Args:
        probabilities: float [*B, T, S], p, in [0, 1] (not checked).
        initial: float broadcastable to [*B, S], the weights of the query before the first, to go on
            from; None for all the weight on the first key.
        method: "recursive" takes the keys one after another; "parallel" all at once, in log2(S)
            steps, by an associative scan. They agree to rounding.

    Returns:
        weights [*B, T, S] in the dtype of `probabilities` (computed in at least float32);
        differentiable in any mode and order.

    Raises:
        ValueError: an argument has the wrong shape or dtype, or there is no such method.

    >>> monotonic_weights(jnp.array([[0.5, 0.5, 1.0], [0.0, 0.5, 1.0]])).tolist()
    [[0.5, 0.25, 0.25], [0.0, 0.375, 0.625]]

    Source: Raffel et al. 2017, "Online and Linear-Time Attention by Enforcing Monotonic
        Alignments", section 2.3 (their p, q and alpha; their T is our S, their U our T).
    """
    probabilities = _checked_probabilities(probabilities)
    if not isinstance(method, str) or method not in _REACHED:
        raise ValueError(f"method must be one of {', '.join(_REACHED)}; got {method!r}")
    *batch_shape, _, source_length = probabilities.shape
    initial = _checked_initial(initial, tuple(batch_shape), source_length)
    dtype = accumulator_dtype(probabilities)
    initial = jnp.broadcast_to(initial, (*batch_shape, source_length))
    weights = _expected(probabilities.astype(dtype), initial.astype(dtype), method)
    return weights.astype(probabilities.dtype)


def hard_monotonic_positions(probabilities: Array, start: Array | int = 0) -> Array:
    """Where each query stops when it takes the first key that is likelier chosen than not.

        t_i = min {j >= t_{i-1} : p_ij >= 1/2},    S if there is none

    A query that finds no key attends to nothing, and its walk has passed the last key: so do all
    later ones. (The paper's Algorithm 1 gives such a query a context of zeros and does not say
    where the next begins. Its expected weights do, for there such a walk is lost, and TensorFlow's
    "hard" mode does the same: so both forms agree wherever all p are 0 or 1.)

    Args:
        probabilities: float [*B, T, S], p; or bool, the choices p >= 1/2.
        start: int broadcastable to *B, from 0 to S: the position of the query before the first; S
            if it attended to nothing.

    Returns:
        positions int32 [*B, T]; S where a query attends to nothing. No gradient passes.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

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
        ValueError: an argument has the wrong shape or dtype.

    >>> hard_monotonic_weights(jnp.array([[0.25, 0.75, 1.0], [0.0, 0.25, 0.25]])).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]

    Source: Raffel et al. 2017, Algorithm 1.
    """
    positions = hard_monotonic_positions(probabilities, start)
    probabilities = jnp.asarray(probabilities)  # it has been checked
    dtype = jnp.float32 if probabilities.dtype == jnp.bool_ else probabilities.dtype
    # Position S, nothing, is outside, and its row zero.
    return jax.nn.one_hot(positions, probabilities.shape[-1], dtype=dtype)


def monotonic_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: str | Score = "additive",
    params: Params = None,
    offset: Array | float = 0.0,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    noise_rng: Array | None = None,
    noise_scale: Array | float = 1.0,
    hard: bool = False,
    initial: Array | None = None,
) -> tuple[Array, Array]:
    """Monotonic attention with any score function.

        p_ij      = sigmoid(score(query_i, key_j) + bias_ij + offset + noise_ij),  0 where masked
        weights   = monotonic_weights(p),  or hard_monotonic_weights(p)
        output_i  = sum_j weights_ij value_j

    [T, S] is materialised, and the queries are taken one after another. A query whose keys are all
    masked gets output 0, and as it stops nowhere, so do later ones: let a mask leave out padded
    queries at the end only. A key or query that no allowed pair contains may hold anything, NaN
    included.

    Args:
        query: float [*B, T, Dq].
        key: float [*B, S, Dk].
        value: float [*B, S, Dv].
        score: a name in `SCORES`, "module:Name", or a `Score`.
        params: the score's parameters, as its `init` makes them.
        offset: float broadcastable to *B (one for each head, say), added to the logits; gradients
            reach it. A walk of constant p = sigmoid(offset) passes exp(-offset) keys a query.
        mask: a `Mask`, or bool broadcastable to [*B, T, S]; True = may attend.
        bias: a `Bias`, or float broadcastable to [*B, T, S]; added to the logits.
        noise_rng: one PRNG key for normal noise on the logits, for training: where it is on, only
            large logits choose surely, and p become 0 or 1, as the hard form takes them. None for
            no noise.
        noise_scale: standard deviation of the noise.
        hard: take the hard form, for decoding. It has no gradient but that of `value`.
        initial: float broadcastable to [*B, S], the weights of the query before the first, to
            decode step by step; None for all the weight on the first key. The hard form begins at
            its first positive entry, and attends to nothing if there is none.

    Returns:
        (output [*B, T, Dv], weights [*B, T, S]) in the query's dtype, computed in float32 (float64
        if any input is). Rows of weights sum to at most 1.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> query, key, value = jnp.ones((2, 1)), jnp.zeros((3, 1)), jnp.array([[1.0], [2.0], [4.0]])
    >>> output, weights = monotonic_attention(query, key, value, score="dot")
    >>> weights.tolist()
    [[0.5, 0.25, 0.125], [0.25, 0.25, 0.1875]]
    >>> output.tolist()
    [[1.5], [1.5]]

    Source: Raffel et al. 2017, section 2.2 to 2.4 (their a(s, h) is our score, r our offset). They
        normalise additive attention's v; here a score stays what it is elsewhere.
    """
    score = get_score(score)
    inputs = checked_inputs(score, query, key, value, params, mask, bias)
    if noise_rng is not None:
        rng = checked_rng(noise_rng, name="noise_rng")
        inputs = inputs._replace(dropout_rng=rng)  # split over the batch
    batch_shape, source_length = inputs.query.shape[:-2], inputs.key.shape[-2]
    offset = _checked_scalar("offset", offset, batch_shape)
    noise_scale = _checked_scalar("noise_scale", noise_scale, batch_shape)
    initial = _checked_initial(initial, batch_shape, source_length)
    if not isinstance(hard, bool):
        raise ValueError(f"hard must be True or False; got {hard!r}")
    options = Options(score, BlockSizes())
    output, weights = _attend(options, hard, inputs, offset, noise_scale, initial)
    seen = functools.partial(seen_from_outside, inputs, output, weights)
    return capture_point(output, seen), weights


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(
    options: Options, hard: bool, inputs: Inputs, offset: Array, noise_scale: Array, initial: Array
) -> tuple[Array, Array]:
    def attend(
        inputs: Inputs, offset: Array, noise_scale: Array, initial: Array
    ) -> tuple[Array, Array]:
        logits, mask = logits_and_mask(options, inputs)
        dtype = logits.dtype
        logits = logits + offset.astype(dtype)
        if inputs.dropout_rng is not None:
            noise = jax.random.normal(inputs.dropout_rng, logits.shape, dtype)
            logits = logits + noise_scale.astype(dtype) * noise
        if mask is not None:
            # Before the sigmoid too: its slope at a masked NaN would reach what made the logit.
            logits = jnp.where(mask, logits, 0)
        probabilities = jax.nn.sigmoid(logits)
        value = inputs.value.astype(dtype)
        if mask is not None:
            probabilities = jnp.where(mask, probabilities, 0)
            # A weight of 0 does not keep a NaN out: 0 * NaN is NaN.
            value = jnp.where(mask.any(axis=0)[:, None], value, 0)
        if hard:
            weights = hard_monotonic_weights(probabilities, _start(initial))
        else:
            weights = _expected(probabilities, initial.astype(dtype), "parallel")
        output = jnp.matmul(weights, value, precision="highest")
        return output.astype(inputs.query.dtype), weights.astype(inputs.query.dtype)

    others = ((offset, 0), (noise_scale, 0), (initial, 1))
    return vmap_over_batch(options.score, attend, inputs, *others)


def _start(initial: Array) -> Array:
    """Where the hard form begins after weights [S]: the first key with any, S if there is none."""
    length = initial.shape[0]
    return jnp.min(jnp.where(initial > 0, jnp.arange(length), length), initial=length)


# --- the expectation ---


def _expected(probabilities: Array, initial: Array, method: str) -> Array:
    reached = _REACHED[method]

    def next_query(previous: Array, p: Array) -> tuple[Array, Array]:
        weights = p * reached(p, previous)
        return weights, weights

    _, weights = jax.lax.scan(next_query, initial, jnp.moveaxis(probabilities, -2, 0))
    return jnp.moveaxis(weights, 0, -2)


def _reached_recursive(p: Array, previous: Array) -> Array:
    """q [*B, S], the probability that the walk gets to key j, one key after another."""

    def next_key(carried: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        p, previous = now
        reached = carried + previous
        return (1 - p) * reached, reached

    by_key = (jnp.moveaxis(p, -1, 0), jnp.moveaxis(previous, -1, 0))
    _, reached = jax.lax.scan(next_key, jnp.zeros_like(p[..., :1].sum(-1)), by_key)
    return jnp.moveaxis(reached, 0, -1)


def _reached_parallel(p: Array, previous: Array) -> Array:
    """The same by composing the maps q -> pass q + gain of neighbouring keys, in pairs."""
    # What passes key j-1 gets to key j. Nothing comes to the first, whatever its factor.
    passing = jnp.concatenate([jnp.zeros_like(p[..., :1]), 1 - p[..., :-1]], axis=-1)

    def compose(first: Any, second: Any) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(compose, (passing, previous), axis=p.ndim - 1)[1]


_REACHED = {"parallel": _reached_parallel, "recursive": _reached_recursive}


# --- what came ---


def _checked_probabilities(probabilities: Any) -> Array:
    probabilities = float_array("probabilities", probabilities)
    if probabilities.ndim < 2:
        raise ValueError(f"probabilities must be [*B, T, S]; got {list(probabilities.shape)}")
    return probabilities


def _checked_choices(probabilities: Any) -> Array:
    """Bool [*B, T, S], p >= 1/2, of probabilities or of bools."""
    choices = any_array("probabilities", probabilities)
    if choices.dtype != jnp.bool_:
        return _checked_probabilities(probabilities) >= 0.5
    if choices.ndim < 2:
        raise ValueError(f"probabilities must be [*B, T, S]; got {list(choices.shape)}")
    return choices


def _checked_initial(initial: Any, batch_shape: tuple[int, ...], source_length: int) -> Array:
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


def _checked_scalar(name: str, number: Any, batch_shape: tuple[int, ...]) -> Array:
    """One float an example."""
    number = float_array(name, float(number) if isinstance(number, int) else number)
    if not broadcasts(number.shape, batch_shape):
        raise ValueError(
            f"{name} must broadcast to the batch axes {list(batch_shape)}; got {list(number.shape)}"
        )
    return number
