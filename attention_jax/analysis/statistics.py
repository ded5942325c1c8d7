"""Numbers that say what attention looks like: how spread, how saturated, how right, how alike.

All are pure functions of weights or logits that are at hand, of any attention, and may be put under
`jax.jit` and `jax.vmap`. All but `saturation` can be differentiated, more than once too. A weight
of 0 is taken for one that is always 0, a masked one: in entropies and divergences it sends gradient
0, where the derivative of w log w has no finite limit. For entropy in linear memory, without
weights, see `attention(..., return_statistics=True)`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.analysis.entropy_terms import divergence, surprise
from attention_jax.analysis.pairs_and_rows import (
    checked_alignment,
    checked_mask,
    checked_pairs,
    checked_rows,
    has_keys,
    mean_over_rows,
    only_rows,
)
from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import checked_fraction
from attention_jax.pairwise.masks import Mask

Array = jax.Array


class AttentionSummary(NamedTuple):
    """What a head's attention looks like on average over the queries that count, [*B] each."""

    entropy: Array  # nats
    normalized_entropy: Array  # 0 (one key) to 1 (all allowed keys alike)
    effective_keys: Array  # keys
    largest_weight: Array
    saturation: Array  # share of the queries
    alignment_error: Array | None  # None without an alignment
    expected_distance: Array | None  # key positions; None without an alignment


def weight_entropy(weights: Array) -> Array:
    """How spread each query's attention is.

        H_i = -sum_j w_ij log w_ij,    0 log 0 = 0

    From 0 (one key) to log S (all keys alike); 0 for a row of zeros (nothing attended to).

    Args:
        weights: float [*B, T, S], at least 0; rows sum to 1, or are 0. They are taken as they are:
            what dropout or a Gaussian window left of a row is not divided by its sum.

    Returns:
        entropy [*B, T] in nats, in float32 (float64 if the weights are). Differentiable; weights of
        0 send gradient 0.

    Raises:
        ValueError: `weights` has the wrong shape or dtype.

    >>> weight_entropy(jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]))
    Array([0.       , 0.6931472, 0.       ], dtype=float32)

    Source: Shannon 1948, section 6; of attention: Ghader and Monz 2017.
    """
    return _entropy(checked_pairs("weights", weights))


def normalized_entropy(weights: Array, mask: Mask | Array | None = None) -> Array:
    """How spread each query's attention is, of how spread it could be.

        H_i / log n_i,    n_i the number of keys that query i may attend to

    From 0 (one key) to 1 (all allowed keys alike), so that rows of different lengths compare; 0
    where at most one key is allowed.

    Args:
        weights: float [*B, T, S], as in `weight_entropy`; at masked places they may hold anything.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
            None: all S may.

    Returns:
        [*B, T] in float32 (float64 if the weights are). Differentiable, as `weight_entropy` is.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> weights = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    >>> mask = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    >>> normalized_entropy(weights, mask)
    Array([0. , 1. , 0.5], dtype=float32)

    Source: Pielou 1966 (evenness, H / H_max), of attention.
    """
    weights = checked_pairs("weights", weights)
    return _normalized_entropy(weights, checked_mask(mask, weights))


def effective_keys(weights: Array) -> Array:
    """How many keys each query attends to: that many alike have the same entropy.

        exp(H_i)

    From 1 (one key) to S (all alike); 0 for a row of zeros.

    Args:
        weights: float [*B, T, S], as in `weight_entropy`.

    Returns:
        [*B, T] in keys, in float32 (float64 if the weights are). Differentiable, as
        `weight_entropy` is.

    Raises:
        ValueError: `weights` has the wrong shape or dtype.

    >>> effective_keys(jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])).round(4)
    Array([1., 2., 0.], dtype=float32)

    Source: Hill 1973, the number N_1.
    """
    return _effective_keys(checked_pairs("weights", weights))


def saturation(weights: Array, *, bound: float = 0.99, rows: Array | None = None) -> Array:
    """The share of queries that look at one key alone, where the softmax hardly has a gradient.

        mean_i [max_j w_ij > bound]

    Args:
        weights: float [*B, T, S]. Rows of zeros (queries without keys) do not count.
        bound: a Python number, 0 <= bound < 1.
        rows: bool [T], or with axes that broadcast to *B in front: the queries that count; the rows
            of others may hold anything. None: all.

    Returns:
        [*B] in float32 (float64 if the weights are); 0 if no query counts. A step function: its
        gradient is 0.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> saturation(jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]))
    Array(0.5, dtype=float32)

    Source: Vaswani et al. 2017, section 3.2.1, name the regime; the measure is ours.
    """
    bound = checked_fraction("bound", bound)
    weights = checked_pairs("weights", weights)
    return _saturation(only_rows(weights, checked_rows(rows, weights)), bound)


def logit_variance(
    logits: Array, mask: Mask | Array | None = None, *, per_row: bool = False
) -> Array:
    """The variance of the logits over allowed pairs: how sharp a softmax they make.

        mean_ij (l_ij - mean_ij l_ij)^2

    Args:
        logits: float [*B, T, S], finite where allowed; -inf counts as masked, as in
            `masked_softmax`. Masked entries may hold anything, NaN included.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
        per_row: one variance a query, over its keys: the part that the softmax sees, which adding a
            number to a row does not change.

    Returns:
        [*B], or [*B, T] with `per_row`, in float32 (float64 if the logits are); 0 where no pair is
        allowed. Differentiable; masked entries send gradient 0.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> logits = jnp.array([[1.0, 3.0], [7.0, jnp.nan]])
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> logit_variance(logits, mask, per_row=True)
    Array([1., 0.], dtype=float32)

    Source: Vaswani et al. 2017, section 3.2.1, footnote 4: Dk for a dot product of unit-variance
    features, 1 once it is scaled.
    """
    logits = checked_pairs("logits", logits)
    allowed = checked_mask(mask, logits) & (logits != -jnp.inf)
    axes = (-1,) if per_row else (-2, -1)
    pairs = jnp.maximum(jnp.sum(allowed, axis=axes, keepdims=True), 1).astype(logits.dtype)
    logits = jnp.where(allowed, logits, 0)  # first, or NaN would come to the gradient
    mean = jnp.sum(logits, axis=axes, keepdims=True) / pairs
    deviations = jnp.where(allowed, logits - mean, 0)
    return jnp.squeeze(jnp.sum(deviations**2, axis=axes, keepdims=True) / pairs, axis=axes)


def alignment_error(weights: Array, alignment: Array, *, rows: Array | None = None) -> Array:
    """How much attention misses the key that each query is known to want.

        1 - mean_i w_i,a_i

    From 0 (all of it on the aligned keys) to 1 (none).

    Args:
        weights: float [*B, T, S]. Rows of zeros (queries without keys) do not count.
        alignment: int [T], or with axes that broadcast to *B in front: a, each query's key. A query
            whose a is not in 0, ..., S - 1 does not count. That of a reversal, padding left out, is
            `attention_jax.reversed_centers(T, lengths)`.
        rows: as in `saturation`, the queries that count.

    Returns:
        [*B] in float32 (float64 if the weights are); 0 if no query counts. Differentiable in the
        weights.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> weights = jnp.array([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    >>> alignment_error(weights, jnp.array([1, 0, -1]))
    Array(0.125, dtype=float32)

    Source: Koehn and Knowles 2017, section 3.5: 1 - their probability mass score.
    """
    weights = checked_pairs("weights", weights)
    rows, alignment = checked_rows(rows, weights), checked_alignment(alignment, weights)
    return _alignment_error(only_rows(weights, rows), alignment)


def expected_distance(weights: Array, alignment: Array, *, rows: Array | None = None) -> Array:
    """How far from the key that it is known to want a query looks, on average.

        mean_i sum_j w_ij |j - a_i|

    Unlike `alignment_error` it tells a near miss from a far one.

    Args:
        weights, alignment, rows: as in `alignment_error`.

    Returns:
        [*B] in key positions, in float32 (float64 if the weights are); 0 if no query counts.
        Differentiable in the weights.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> weights = jnp.array([[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]])
    >>> expected_distance(weights, jnp.array([2, 1]))
    Array(0.75, dtype=float32)

    Source: Vig and Belinkov 2019 (mean attention distance), here from a_i in place of i.
    """
    weights = checked_pairs("weights", weights)
    rows, alignment = checked_rows(rows, weights), checked_alignment(alignment, weights)
    return _expected_distance(only_rows(weights, rows), alignment)


def jensen_shannon(weights_a: Array, weights_b: Array) -> Array:
    """How much two attentions differ, query by query: two heads, two scores, before and after.

        JS_i = sum_j (a_ij log(a_ij / m_ij) + b_ij log(b_ij / m_ij)) / 2,    m = (a + b) / 2

    Symmetric; from 0 (the same) to log 2 (no key in common), to rounding. Its square root is a
    metric. With a row of zeros in both it is 0, in one alone log(2) / 2, which is what the formula
    says.

    Args:
        weights_a: float [*B, T, S], as in `weight_entropy`.
        weights_b: float [*B, T, S].

    Returns:
        [*B, T] in nats, in float32, or float64 if either is. Differentiable in both; weights of 0
        send gradient 0. Where a = b it is exactly 0, and nearby as accurate as its arguments.

    Raises:
        ValueError: an argument has the wrong dtype or shape, or the two shapes differ.

    >>> jensen_shannon(jnp.array([[1.0, 0.0], [0.5, 0.5]]), jnp.array([[0.0, 1.0], [0.5, 0.5]]))
    Array([0.6931472, 0.       ], dtype=float32)

    Source: Lin 1991, both of his weights 1/2, logarithms natural; between heads: Clark et al. 2019,
    section 6.
    """
    weights_a = checked_pairs("weights_a", weights_a)
    weights_b = checked_pairs("weights_b", weights_b)
    if weights_a.shape != weights_b.shape:
        raise ValueError(
            f"weights_b must be {list(weights_a.shape)}, as weights_a is;"
            f" got {list(weights_b.shape)}"
        )
    dtype = accumulator_dtype(weights_a, weights_b)
    weights_a, weights_b = weights_a.astype(dtype), weights_b.astype(dtype)
    return jnp.sum(divergence(weights_a, weights_b), axis=-1)


def attention_summary(
    weights: Array,
    *,
    mask: Mask | Array | None = None,
    rows: Array | None = None,
    alignment: Array | None = None,
    bound: float = 0.99,
) -> AttentionSummary:
    """All of one attention's statistics, each averaged over the queries that count.

    Args:
        weights: float [*B, T, S]. Rows of zeros (queries without keys) do not count.
        mask: as in `normalized_entropy`.
        rows: as in `saturation`, the queries that count.
        alignment: as in `alignment_error`; may be left out.
        bound: as in `saturation`.

    Returns:
        `AttentionSummary`, [*B] each, in float32 (float64 if the weights are). A query whose
        alignment is out of range counts for all but the last two.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> weights = jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    >>> summary = attention_summary(weights, alignment=jnp.array([1, 1, 1]))
    >>> summary.effective_keys.round(4), summary.alignment_error
    (Array(1.5, dtype=float32), Array(0.75, dtype=float32))
    """
    bound = checked_fraction("bound", bound)
    weights = checked_pairs("weights", weights)
    allowed, rows = checked_mask(mask, weights), checked_rows(rows, weights)
    alignment = None if alignment is None else checked_alignment(alignment, weights)
    weights = only_rows(jnp.where(allowed, weights, 0), rows)
    counted = has_keys(weights)
    return AttentionSummary(
        entropy=mean_over_rows(_entropy(weights), counted),
        normalized_entropy=mean_over_rows(_normalized_entropy(weights, allowed), counted),
        effective_keys=mean_over_rows(_effective_keys(weights), counted),
        largest_weight=mean_over_rows(jnp.max(weights, axis=-1, initial=0), counted),
        saturation=_saturation(weights, bound),
        alignment_error=None if alignment is None else _alignment_error(weights, alignment),
        expected_distance=None if alignment is None else _expected_distance(weights, alignment),
    )


# --- of checked arguments, in the dtype of the result ---


def _entropy(weights: Array) -> Array:
    return jnp.sum(surprise(weights), axis=-1)


def _normalized_entropy(weights: Array, allowed: Array) -> Array:
    keys = jnp.sum(allowed, axis=-1)
    several = keys > 1
    largest = jnp.log(jnp.where(several, keys, 2).astype(weights.dtype))
    return jnp.where(several, _entropy(jnp.where(allowed, weights, 0)) / largest, 0)


def _effective_keys(weights: Array) -> Array:
    return jnp.where(has_keys(weights), jnp.exp(_entropy(weights)), 0)


def _saturation(weights: Array, bound: float) -> Array:
    largest = jnp.max(weights, axis=-1, initial=0)
    saturated = (largest > bound).astype(weights.dtype)
    return mean_over_rows(jnp.where(jnp.isnan(largest), jnp.nan, saturated), has_keys(weights))


def _alignment_error(weights: Array, alignment: Array) -> Array:
    aligned = _distances(weights, alignment) == 0
    hits = jnp.sum(jnp.where(aligned, weights, 0), axis=-1)
    return mean_over_rows(1 - hits, has_keys(weights) & jnp.any(aligned, axis=-1))


def _expected_distance(weights: Array, alignment: Array) -> Array:
    distances = _distances(weights, alignment)
    counted = has_keys(weights) & jnp.any(distances == 0, axis=-1)
    return mean_over_rows(jnp.sum(weights * distances.astype(weights.dtype), axis=-1), counted)


def _distances(weights: Array, alignment: Array) -> Array:
    """|j - a_i|, int [*B, T, S]"""
    keys = jax.lax.broadcasted_iota(alignment.dtype, weights.shape, weights.ndim - 1)
    return jnp.abs(keys - alignment[..., None])
