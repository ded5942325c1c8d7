"""Rows of attention: their weights, the sums over keys that arrive in tiles, and the results.

The weights of a row are functions of its logits after a shift by two numbers of the row. Where a
search has found the threshold, or where it is 0, the shift is known before the first key, and the
sums of tiles add up. For softmax the shift is M, the largest of the logits x_j so far (the *online
softmax*), and the sums are

    total = sum_j exp(x_j - M),    weighted = sum_j exp(x_j - M) v_j,
    moment = sum_j exp(x_j - M) (x_j - M).

When M rises by r, the first two shrink by exp(-r), and moment becomes exp(-r) (moment - r total).
The results do not depend on M, so it needs no gradient. With n the total at the end, a row has

    output = weighted / n,    logsumexp = M + log n,    entropy = log n - moment / n.

A sink is one more key, with the logit z and the value 0. The other keys then have the share

    p = sigmoid(M - z + log n)

of the weight, so that weights and output are those without the sink times p, and

    entropy with the sink = p entropy - p log p - (1 - p) log (1 - p).

So no loop over keys knows of sinks.

Source: Milakov and Gimelshein 2018, algorithm 3; Rabe and Staats 2021, section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.names import is_of_this_package
from attention_jax.core.products import weighted_sum
from attention_jax.core.serialization import exported

Array = jax.Array


class BoundFamily(NamedTuple):
    """The `weight` and `inverse` of a normaliser, with its parameters."""

    normalizer: Any  # a `Normalizer` that is its own family
    params: Any

    def weight(self, shifted: Array) -> Array:
        """The weights of shifted logits; the `weight` of a user does not see -inf.

        Its derivative with respect to a parameter could be 0 * -inf, NaN, there.
        """
        if is_of_this_package(self.normalizer.__class__):
            return self.normalizer.weight(self.params, shifted)
        masked = shifted == -jnp.inf
        weights = self.normalizer.weight(self.params, jnp.where(masked, 0, shifted))
        return jnp.where(masked, 0, weights.astype(shifted.dtype))

    def inverse(self, weight: Array) -> Array:
        """The shifted logits with these weights."""
        return self.normalizer.inverse(self.params, weight).astype(weight.dtype)

    def weights_and_slopes(self, shifted: Array) -> tuple[Array, Array]:
        """The weights of shifted logits, and their derivatives."""
        return jax.jvp(self.weight, (shifted,), (jnp.ones_like(shifted),))


# --- the results of softmax ---


@exported
class AttentionStatistics(NamedTuple):
    """Statistics of each row of attention, that is of each query."""

    logsumexp: Array  # [*B, T]  log sum_j exp(logits_j) over allowed keys; -inf without keys
    entropy: Array  # [*B, T]  -sum_j w_j log w_j in nats, before dropout; 0 without keys
    max_logit: Array  # [*B, T]  largest allowed logit, without gradient; -inf without keys


class RowSummary(NamedTuple):
    """The numbers of each row of a softmax, from which statistics and sinks follow.

    All are differentiable except `largest`. M and log n stay apart, because their sum would be
    rounded: at logits of 1e4, to 1e-3 in float32.
    """

    largest: Any  # [t] M; -inf without keys. None in what a gradient saves, which is finite
    log_sum: Array  # [t] log n; 0 without keys
    entropy: Any  # [t] in nats; 0 without keys; None where it is not requested

    @classmethod
    def of_sums(cls, largest: Array, total: Array, moment: Array | None) -> RowSummary:
        """The summary of rows [t] with these sums; the moment gives the entropy.

        `largest` may hold anything in a row without keys, whose total is 0.
        """
        any_allowed = total != 0  # `> 0` would hide a NaN
        total = jnp.where(any_allowed, total, 1)
        log_sum = jnp.log(total)
        entropy = None if moment is None else jnp.where(any_allowed, log_sum - moment / total, 0)
        return cls(jnp.where(any_allowed, largest, -jnp.inf), log_sum, entropy)

    def statistics(self) -> AttentionStatistics:
        return AttentionStatistics(self.largest + self.log_sum, self.entropy, self.largest)

    def with_sink(self, sink: Array) -> tuple[Array, RowSummary]:
        """p [t], 0 without keys, and the summary of the rows with a sink of the logit [] `sink`."""
        empty = self.largest == -jnp.inf
        keys = jnp.where(empty, 0, self.largest)
        above = keys - sink + self.log_sum
        share = jnp.where(empty, 0, jax.nn.sigmoid(above))
        largest = jnp.maximum(keys, jax.lax.stop_gradient(sink))
        log_sum = jnp.logaddexp(keys - largest + self.log_sum, sink - largest)
        entropy = self.entropy
        if entropy is not None:
            above = jnp.clip(above, -1e3, 1e3)  # 0 times infinity would be NaN
            p, rest = jax.nn.sigmoid(above), jax.nn.sigmoid(-above)
            entropy = p * (entropy + jax.nn.softplus(-above)) + rest * jax.nn.softplus(above)
            entropy = jnp.where(empty, 0, entropy)
        largest = jnp.where(empty, -jnp.inf, largest)
        return share, RowSummary(largest, jnp.where(empty, 0, log_sum), entropy)


# --- rows whose keys arrive in tiles ---

LOWEST = float(jnp.finfo(jnp.float32).min)  # of kernels


class SoftmaxSums(NamedTuple):
    """The sums of a softmax over the keys so far, of each row: arrays, or a kernel's references."""

    largest: Any  # [T] M; the lowest float without keys: -inf minus -inf would be NaN
    total: Any  # [T]; 0 without keys
    moment: Any  # [T]; None where no entropy is requested

    def with_tile(
        self,
        logits: Array,
        largest: Array,
        spread: Callable[[Array], Array],
        sum_of_rows: Callable[[Array], Array],
    ) -> tuple[SoftmaxSums, Array, Array]:
        """(the sums with a tile of keys, its exp(x - M), the factor of what was summed before).

        Args:
            logits: [t, s]; -inf where masked.
            largest: rows of the largest logits of this tile, in the form of the sums' rows.
            spread: rows -> tile.
            sum_of_rows: tile -> rows.
        """
        largest = jnp.maximum(self.largest, largest)
        rise = self.largest - largest
        shrink = jnp.exp(rise)
        shifted = logits - spread(largest)
        exponentials = jnp.exp(shifted)
        moment = self.moment
        if moment is not None:
            moment = shrink * (moment + where_positive(shrink, rise) * self.total)
            moment = moment + sum_of_rows(exponentials * where_positive(exponentials, shifted))
        total = shrink * self.total + sum_of_rows(exponentials)
        return SoftmaxSums(largest, total, moment), exponentials, shrink


def where_positive(exponentials: Array, shifted: Array) -> Array:
    """The shifted logits; 0 where the exponential is 0, since 0 * -inf would be NaN."""
    return jnp.where(exponentials > 0, shifted, 0.0)


class RowShift(NamedTuple):
    """The two numbers that are subtracted from the logits of each row, one after the other."""

    reference: Array  # [t] near the largest logit
    threshold: Array | None = None  # [t] None for 0

    def shifted(self, logits: Array) -> Array:
        """The logits [t, s] after the shift."""
        shifted = logits - self.reference[:, None]
        return shifted if self.threshold is None else shifted - self.threshold[:, None]


class FinalRows(NamedTuple):
    """The results of t rows, and the numbers from which their weights are recomputed."""

    output: Array  # [t, Dv]
    summary: RowSummary | None  # [t]; None unless the weights are a softmax
    shift: RowShift
    empty: Array  # bool [t], whether all weights are 0: the row then sends no gradient
    divisor: Array  # [t] divides the weights of shifted logits
    mean: Array | None  # [t, Dv] of the contract; None if it is the output, or 0


class RowSums(NamedTuple):
    """The sums over the keys so far, for t rows (queries)."""

    shift: RowShift  # [t]; of softmax the largest logit
    # (total [t], weighted sum of values [t, Dv]) of the weights; after a search for the threshold
    # also of the slopes of the weights, for the mean.
    sums: tuple[tuple[Array, Array], ...]
    moment: Array | None = None  # [t] for the entropy of a softmax

    @classmethod
    def empty(cls, normalizer: Any, weighted: Array, *, entropy: bool) -> RowSums:
        """The sums before the first key.

        Args:
            normalizer: the `Normalizer`.
            weighted: zeros [t, Dv].
            entropy: whether a softmax sums what its entropy needs.
        """
        family = normalizer.family
        zeros = jnp.zeros(weighted.shape[:1], weighted.dtype)
        sums = zeros, weighted
        if family.is_softmax:
            lowest = jnp.finfo(zeros.dtype).min
            return cls(RowShift(zeros + lowest), (sums,), zeros if entropy else None)
        if family.sums_to_one:
            return cls(RowShift(zeros, zeros), (sums, sums))
        return cls(RowShift(zeros), (sums,))

    def update(
        self,
        logits: Array,
        values: Array,
        factors_of_values: Callable[[Array], Array],
        family: BoundFamily,
    ) -> RowSums:
        """The sums after s more keys.

        Args:
            logits: transformed logits [t, s], -inf where masked.
            values: [s, Dv].
            factors_of_values: takes weights [t, s] and returns them after dropout and damping, as
                they multiply the values.
            family: makes the weights of shifted logits.
        """
        if family.normalizer.is_softmax:
            ((total, weighted),) = self.sums
            before = SoftmaxSums(self.shift.reference, total, self.moment)
            sums, exponentials, shrink = before.with_tile(
                logits,
                jax.lax.stop_gradient(jnp.max(logits, axis=1)),
                lambda rows: rows[:, None],
                functools.partial(jnp.sum, axis=1),
            )
            factors = factors_of_values(exponentials)
            weighted = shrink[:, None] * weighted + weighted_sum(factors, values)
            return RowSums(RowShift(sums.largest), ((sums.total, weighted),), sums.moment)
        shifted = self.shift.shifted(logits)
        searched = len(self.sums) > 1
        weights = family.weights_and_slopes(shifted) if searched else (family.weight(shifted),)
        tile = tuple(
            (jnp.sum(each, axis=1), weighted_sum(factors_of_values(each), values))
            for each in weights
        )
        return RowSums(self.shift, jax.tree.map(jnp.add, self.sums, tile))

    def finalize(self, normalizer: Any) -> FinalRows:
        """The results after the last key."""
        (total, output), *slopes = self.sums
        empty = total == 0
        summary, mean = None, None
        divisor = jnp.where(empty | (not normalizer.family.sums_to_one), 1, total)
        if normalizer.family.is_softmax:
            summary = RowSummary.of_sums(self.shift.reference, total, self.moment)
        else:  # see `threshold.py`
            divisor = jax.lax.stop_gradient(divisor)
        output = output / divisor[:, None]
        for slope, sloped in slopes:
            flat = empty | (slope == 0)  # at the corner of a rectified line all slopes may be 0
            mean = jnp.where(flat[:, None], 0, sloped / jnp.where(flat, 1, slope)[:, None])
        # The weighted sum of a row without keys is 0 * NaN if a value is NaN: replace it by 0.
        output = jnp.where(empty[:, None], 0, output)
        shift = self.shift._replace(reference=jnp.where(empty, 0, self.shift.reference))
        return FinalRows(output, summary, shift, empty, divisor, mean)


# --- rows that are materialised ---


def summary_of_rows(logits: Array) -> RowSummary:
    """The summary [..., T] of rows of logits [..., T, S], float32 or wider, -inf where masked."""
    largest, exponentials, total = _shifted_exponentials(logits, -1)
    moment = jnp.sum(exponentials * where_positive(exponentials, logits - largest), axis=-1)
    return RowSummary.of_sums(largest[..., 0], total[..., 0], moment)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax_of_rows(logits: Array, axis: int) -> Array:
    """The softmax along one axis of logits that are -inf where masked; 0 where all are."""
    _, exponentials, total = _shifted_exponentials(logits, axis)
    return exponentials / jnp.where(total == 0, 1, total)


# The Jacobian of one row is dw_j / dl_k = w_j (delta_jk - w_k), so a tangent dl becomes
#     dw_j = w_j (dl_j - sum_k w_k dl_k).
# The Jacobian is symmetric, so the same formula is the vector-Jacobian product. It is a function of
# w, so JAX can differentiate it again. It is 0 for a row without allowed keys (all w are 0), and it
# does not read the dl of masked entries.
@softmax_of_rows.defjvp
def _softmax_jvp(axis, primals, tangents):
    weights, (dlogits,) = softmax_of_rows(*primals, axis), tangents
    dlogits = jnp.where(weights > 0, dlogits, 0)
    # A product: the compiler of jaxlib 0.10.2 returns a wrong sum(weights * dlogits) for a batch of
    # tangents of the gradient, which is what `jax.hessian` computes.
    mean = jnp.vecdot(weights, dlogits, axis=axis, precision=jax.lax.Precision.HIGHEST)
    return weights, weights * (dlogits - jnp.expand_dims(mean, axis))


def _shifted_exponentials(logits: Array, axis: int) -> tuple[Array, Array, Array]:
    """The largest logit M (0 without keys), exp(logits - M), and the sum of those."""
    largest = jnp.max(logits, axis=axis, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    exponentials = jnp.exp(logits - largest)
    return largest, exponentials, jnp.sum(exponentials, axis=axis, keepdims=True)
