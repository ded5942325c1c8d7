"""Statistics of attention weights and logits: entropy, saturation, alignment, divergence.

All are pure functions of the weights or logits of any attention, and work under `jax.jit` and
`jax.vmap`. All except `saturation` are differentiable, at every order. A weight of 0 counts as a
masked weight, which is always 0: in entropies and divergences it sends gradient 0, although the
derivative of w log w has no finite limit there. For entropy in linear memory, without weights, see
`attention(..., return_statistics=True)`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.analysis.entropy_terms import divergence, is_zero, surprise
from attention_jax.core.arrays import accumulator_dtype, bool_array, float_array, integer_array
from attention_jax.core.checks import checked_fraction
from attention_jax.core.serialization import exported
from attention_jax.functional.checks import check_axes
from attention_jax.positions.contract import Mask, as_mask

Array = jax.Array


@exported
class AttentionSummary(NamedTuple):
    """The statistics of each head, averaged over the queries that count; [*B] each."""

    entropy: Array  # nats
    normalized_entropy: Array  # 0 (one key) to 1 (equal weights of all allowed keys)
    effective_keys: Array  # keys
    largest_weight: Array  # from 0 to 1
    saturation: Array  # share of the queries
    alignment_error: Array | None  # None without an alignment
    expected_distance: Array | None  # key positions; None without an alignment


def weight_entropy(weights: Array) -> Array:
    """The entropy of each query's weights.

        H_i = -sum_j w_ij log w_ij,    0 log 0 = 0

    It lies between 0 (one key) and log S (equal weights); it is 0 for a row of zeros, a query that
    attends to no key.

    Args:
        weights: float [*B, T, S], at least 0; rows sum to 1, or are 0. They are not normalised: a
            row that dropout or a Gaussian window has reduced is not divided by its sum.

    Returns:
        entropy [*B, T] in nats, in float32 (float64 if the weights are). Differentiable; weights of
        0 send gradient 0.

    Raises:
        ValueError: `weights` has the wrong shape or dtype.

    >>> weight_entropy(jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]))
    Array([0.       , 0.6931472, 0.       ], dtype=float32)

    Source: Shannon 1948, section 6; for attention: Ghader and Monz 2017.
    """
    return jnp.sum(surprise(as_pairs(weights).pairs), axis=-1)


def normalized_entropy(weights: Array, mask: Mask | Array | None = None) -> Array:
    """The entropy of each query's weights, divided by the largest possible entropy.

        H_i / log n_i,    n_i the number of keys that query i may attend to

    It lies between 0 (one key) and 1 (equal weights of all allowed keys), so that rows with
    different numbers of allowed keys are comparable; it is 0 where at most one key is allowed.

    Args:
        weights: float [*B, T, S], as in `weight_entropy`; masked entries may have any value.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
            None: all pairs may attend.

    Returns:
        [*B, T] in float32 (float64 if the weights are). Differentiable, as `weight_entropy` is.

    Raises:
        ValueError: an argument has the wrong shape or dtype.

    >>> weights = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    >>> mask = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    >>> normalized_entropy(weights, mask)
    Array([0. , 1. , 0.5], dtype=float32)

    Source: Pielou 1966 (evenness, H / H_max), applied to attention.
    """
    weights, allowed = as_pairs(weights, mask)
    num_keys = jnp.sum(allowed, axis=-1)
    has_choice = num_keys > 1
    largest_entropy = jnp.log(jnp.where(has_choice, num_keys, 2).astype(weights.dtype))
    entropy = weight_entropy(jnp.where(allowed, weights, 0))
    return jnp.where(has_choice, entropy / largest_entropy, 0)


def effective_keys(weights: Array) -> Array:
    """The effective number of keys of each query: as many equal weights have the same entropy.

        exp(H_i)

    It lies between 1 (one key) and S (equal weights); it is 0 for a row of zeros.

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
    weights = as_pairs(weights).pairs
    return jnp.where(has_keys(weights), jnp.exp(weight_entropy(weights)), 0)


def saturation(weights: Array, *, bound: float = 0.99, rows: Array | None = None) -> Array:
    """The share of queries with nearly all weight on one key, where the gradient vanishes.

        mean_i [max_j w_ij > bound]

    Args:
        weights: float [*B, T, S]. Rows of zeros (queries without keys) do not count.
        bound: a Python number, 0 <= bound < 1.
        rows: bool [T], or with leading axes that broadcast to *B: True for the queries that count;
            the rows of other queries may have any value. None: all queries count.

    Returns:
        [*B] in float32 (float64 if the weights are); 0 if no query counts. A step function: its
        gradient is 0.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> saturation(jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]))
    Array(0.5, dtype=float32)

    Source: Vaswani et al. 2017, section 3.2.1, for the regime; the measure is ours.
    """
    bound = checked_fraction("bound", bound)
    weights = as_pairs(weights, rows=rows).pairs
    largest = jnp.max(weights, axis=-1, initial=0)
    saturated = (largest > bound).astype(weights.dtype)
    return mean_over_rows(jnp.where(jnp.isnan(largest), jnp.nan, saturated), has_keys(weights))


def logit_variance(
    logits: Array, mask: Mask | Array | None = None, *, per_row: bool = False
) -> Array:
    """The variance of the logits over allowed pairs, which determines the softmax's sharpness.

        mean_ij (l_ij - mean_ij l_ij)^2

    Args:
        logits: float [*B, T, S], finite where allowed; -inf counts as masked, as in
            `masked_softmax`. Masked entries may have any value, including NaN.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
        per_row: return a variance for each query, over its keys. Like the softmax, it does not
            depend on a constant added to a row.

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
    features, 1 for a scaled dot product.
    """
    logits, allowed = as_pairs(logits, mask, name="logits")
    allowed = allowed & (logits != -jnp.inf)
    axes = (-1,) if per_row else (-2, -1)
    pairs = jnp.maximum(jnp.sum(allowed, axis=axes, keepdims=True), 1).astype(logits.dtype)
    logits = jnp.where(allowed, logits, 0)  # before the sums: NaN would reach the gradient
    mean = jnp.sum(logits, axis=axes, keepdims=True) / pairs
    deviations = jnp.where(allowed, logits - mean, 0)
    return jnp.squeeze(jnp.sum(deviations**2, axis=axes, keepdims=True) / pairs, axis=axes)


def alignment_error(weights: Array, alignment: Array, *, rows: Array | None = None) -> Array:
    """The weight that queries do not put on their aligned keys, on average.

        1 - mean_i w_i,a_i

    It lies between 0 (all weight on the aligned keys) and 1 (no weight on them).

    Args:
        weights: float [*B, T, S]. Rows of zeros (queries without keys) do not count.
        alignment: int [T], or with leading axes that broadcast to *B: a, the aligned key of each
            query. A query whose a is not in 0, ..., S - 1 does not count. The alignment of a
            reversal, without padding, is `attention_jax.reversed_centers(T, lengths)`.
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
    weights, _ = as_pairs(weights, rows=rows)
    aligned = _distances(weights, alignment) == 0
    aligned_weights = jnp.sum(jnp.where(aligned, weights, 0), axis=-1)
    return mean_over_rows(1 - aligned_weights, has_keys(weights) & jnp.any(aligned, axis=-1))


def expected_distance(weights: Array, alignment: Array, *, rows: Array | None = None) -> Array:
    """The expected distance between the attended key and the aligned key, averaged over queries.

        mean_i sum_j w_ij |j - a_i|

    Unlike `alignment_error`, it depends on how far a miss is from the aligned key.

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

    Source: Vig and Belinkov 2019 (mean attention distance), with the distance from a_i instead of
    i.
    """
    weights, _ = as_pairs(weights, rows=rows)
    distances = _distances(weights, alignment)
    expected = jnp.sum(weights * distances.astype(weights.dtype), axis=-1)
    return mean_over_rows(expected, has_keys(weights) & jnp.any(distances == 0, axis=-1))


def jensen_shannon(weights_a: Array, weights_b: Array) -> Array:
    """The Jensen-Shannon divergence of two attentions, for each query.

        JS_i = sum_j (a_ij log(a_ij / m_ij) + b_ij log(b_ij / m_ij)) / 2,    m = (a + b) / 2

    It is symmetric, and lies between 0 (equal weights) and log 2 (no key in common), up to
    rounding. Its square root is a metric. The formula gives 0 if both rows are zeros, and
    log(2) / 2 if one row is zeros.

    Args:
        weights_a: float [*B, T, S], as in `weight_entropy`.
        weights_b: float [*B, T, S].

    Returns:
        [*B, T] in nats, in float32, or float64 if either is. Differentiable in both; weights of 0
        send gradient 0. Exactly 0 where a = b, and near there as accurate as the arguments.

    Raises:
        ValueError: an argument has the wrong dtype or shape, or the two shapes differ.

    >>> jensen_shannon(jnp.array([[1.0, 0.0], [0.5, 0.5]]), jnp.array([[0.0, 1.0], [0.5, 0.5]]))
    Array([0.6931472, 0.       ], dtype=float32)

    Source: Lin 1991, with both weights 1/2 and natural logarithms; between heads: Clark et al.
    2019, section 6.
    """
    weights_a = as_pairs(weights_a, name="weights_a").pairs
    weights_b = as_pairs(weights_b, name="weights_b").pairs
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
    """All statistics of an attention, averaged over the queries that count.

    Args:
        weights: float [*B, T, S]. Rows of zeros (queries without keys) do not count.
        mask: as in `normalized_entropy`.
        rows: as in `saturation`, the queries that count.
        alignment: as in `alignment_error`; None for no alignment.
        bound: as in `saturation`.

    Returns:
        `AttentionSummary`, [*B] each, in float32 (float64 if the weights are). A query whose
        alignment is out of range counts in all statistics except the last two.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> weights = jnp.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    >>> summary = attention_summary(weights, alignment=jnp.array([1, 1, 1]))
    >>> summary.effective_keys.round(4), summary.alignment_error
    (Array(1.5, dtype=float32), Array(0.75, dtype=float32))
    """
    weights, allowed = as_pairs(weights, mask, rows)
    weights = jnp.where(allowed, weights, 0)
    counted = has_keys(weights)
    return AttentionSummary(
        entropy=mean_over_rows(weight_entropy(weights), counted),
        normalized_entropy=mean_over_rows(normalized_entropy(weights, allowed), counted),
        effective_keys=mean_over_rows(effective_keys(weights), counted),
        largest_weight=mean_over_rows(jnp.max(weights, axis=-1, initial=0), counted),
        saturation=saturation(weights, bound=bound),
        alignment_error=None if alignment is None else alignment_error(weights, alignment),
        expected_distance=None if alignment is None else expected_distance(weights, alignment),
    )


# --- means over rows ---


def has_keys(weights: Array) -> Array:
    """Whether each query attends to any key: bool [*B, T]."""
    return ~jnp.all(is_zero(weights), axis=-1)


def mean_over_rows(values: Array, counted: Array) -> Array:
    """[*B, T] -> [*B], the mean over the rows that count; 0 if no row counts."""
    total = jnp.sum(jnp.where(counted, values, 0), axis=-1)
    return total / jnp.maximum(jnp.sum(counted, axis=-1), 1).astype(values.dtype)


# --- the entry point of all arguments ---


class _MaskedPairs(NamedTuple):
    """Weights or logits, and the allowed pairs among them, each with the batch axes *B."""

    pairs: Array  # [*B, T, S] in at least float32; 0 in the rows of queries that do not count
    allowed: Array  # bool [*B, T, S]


def as_pairs(pairs: Any, mask: Any = None, rows: Any = None, name: str = "weights") -> _MaskedPairs:
    """Checks the arguments of a statistic, and brings them to one shape and dtype.

    Args:
        pairs: float [*B, T, S].
        mask: as in `normalized_entropy`; None allows all pairs.
        rows: as in `saturation`. Queries that do not count stay allowed.
        name: that of `pairs` in messages.

    Raises:
        ValueError: an argument has the wrong shape or dtype.
    """
    pairs = float_array(name, pairs)
    if pairs.ndim < 2:
        raise ValueError(f"{name} must be [*B, T, S]; got {list(pairs.shape)}")
    *batch, target_length, source_length = pairs.shape
    mask = as_mask(jnp.ones((1, 1), bool) if mask is None else mask)
    mask.check(tuple(batch), target_length, source_length)
    kept = pairs.astype(accumulator_dtype(pairs))
    if rows is not None:
        kept = jnp.where(per_query("rows", bool_array("rows", rows, "counts"), pairs), kept, 0)
    allowed = jnp.broadcast_to(mask.materialize(target_length, source_length), pairs.shape)
    return _MaskedPairs(kept, allowed)


def _distances(weights: Array, alignment: Any) -> Array:
    """|j - a_i|, int32 [*B, T, S]."""
    alignment = integer_array("alignment", alignment).astype(jnp.int32)
    keys = jax.lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    return jnp.abs(keys - per_query("alignment", alignment, weights))


def per_query(name: str, array: Array, pairs: Array) -> Array:
    """[T], or with batch axes in front, -> [*B, T, 1], for pairs [*B, T, S]."""
    *batch, target_length, _ = pairs.shape
    check_axes(name, array, (target_length,), tuple(batch))
    return jnp.broadcast_to(array, pairs.shape[:-1])[..., None]
