"""The sums of attention over keys that arrive in tiles, for every normaliser.

The weights of a row are functions of its logits after a shift by two numbers of the row. Where a
search has found the threshold, or where it is 0, the shift is known before the first key, and the
sums of tiles add up. For softmax the shift is the largest logit so far: when it rises, the sums
shrink, see `softmax_rows.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.products import weighted_sum
from attention_jax.normalizers.contract import BoundNormalizer, Normalizer
from attention_jax.normalizers.softmax_rows import RowShift, RowSummary, SoftmaxSums
from attention_jax.normalizers.threshold import OverKeys, find_threshold

Array = jax.Array


def sums_over_keys(
    sums: RowSums, bound: BoundNormalizer, over_keys: OverKeys, num_keys: int
) -> RowSums:
    """The sums of t rows after the keys that `over_keys` visits.

    A normaliser with a threshold first searches for it, and visits the keys several times.

    Args:
        sums: those before.
        bound: makes the weights.
        over_keys: visits the keys tile by tile; it gives `RowSums.with_tile` its arguments.
        num_keys: an upper bound on the keys of a row.
    """
    if bound.normalizer.searches:
        shift = find_threshold(bound, over_keys, sums.shift.reference, num_keys)
        sums = sums._replace(shift=shift)
    return over_keys(functools.partial(RowSums.with_tile, bound=bound), sums)


class RowSums(NamedTuple):
    """The sums over the keys so far, for t rows (queries)."""

    shift: RowShift  # [t]; of softmax the largest logit
    # (sum_j w_j [t], sum_j w_j v_j [t, Dv]) with the undivided weights w and the values v.
    by_weights: tuple[Array, Array]
    by_slopes: tuple[Array, Array] | None = None  # with the slopes of w; None without a search
    moment: Array | None = None  # [t] for the entropy of a softmax

    @classmethod
    def empty(cls, normalizer: Normalizer, zeros: Array, *, entropy: bool) -> RowSums:
        """The sums before the first key.

        Args:
            normalizer: the `Normalizer`.
            zeros: [t, Dv].
            entropy: whether a softmax sums what its entropy needs.
        """
        zero = jnp.zeros(zeros.shape[:1], zeros.dtype)
        sums = zero, zeros
        if normalizer.is_softmax:
            lowest = zero + jnp.finfo(zeros.dtype).min
            return cls(RowShift(lowest), sums, moment=zero if entropy else None)
        if normalizer.searches:
            return cls(RowShift(zero, zero), sums, by_slopes=sums)
        return cls(RowShift(zero), sums)

    def with_tile(
        self,
        logits: Array,
        values: Array,
        factors_of_values: Callable[[Array], Array],
        bound: BoundNormalizer,
    ) -> RowSums:
        """The sums after s more keys.

        Args:
            logits: transformed logits [t, s], -inf where masked.
            values: [s, Dv].
            factors_of_values: takes weights [t, s] and returns them after dropout and damping, as
                they multiply the values.
            bound: makes the weights of shifted logits.
        """
        if bound.normalizer.is_softmax:
            largest = jax.lax.stop_gradient(jnp.max(logits, axis=1))
            total, weighted = self.by_weights
            before = SoftmaxSums(self.shift.reference, total, self.moment)
            sums, exponentials, shrink = before.with_tile(logits, largest)
            added = weighted_sum(factors_of_values(exponentials), values)
            weighted = shrink[:, None] * weighted + added
            return RowSums(RowShift(sums.largest), (sums.total, weighted), moment=sums.moment)

        def add(sums: tuple[Array, Array], weights: Array) -> tuple[Array, Array]:
            total, weighted = sums
            added = weighted_sum(factors_of_values(weights), values)
            return total + jnp.sum(weights, axis=1), weighted + added

        shifted = self.shift.shifted(logits)
        if self.by_slopes is None:
            return self._replace(by_weights=add(self.by_weights, bound.weight(shifted)))
        weights, slopes = bound.weights_and_slopes(shifted)
        return self._replace(
            by_weights=add(self.by_weights, weights), by_slopes=add(self.by_slopes, slopes)
        )

    def finalize(self, normalizer: Normalizer) -> FinalRows:
        """The results after the last key; the rows may have further axes in front."""
        total, weighted = self.by_weights
        empty = total == 0
        divisor = jnp.where(empty | (not normalizer.sums_to_one), 1, total)
        summary, mean = None, None
        if normalizer.is_softmax:
            summary = SoftmaxSums(self.shift.reference, total, self.moment).summary()
        else:  # see `threshold.py`
            divisor = jax.lax.stop_gradient(divisor)
        if self.by_slopes is not None:
            slope, sloped = self.by_slopes
            flat = empty | (slope == 0)  # at the corner of a rectified line all slopes may be 0
            mean = jnp.where(flat[..., None], 0, sloped / jnp.where(flat, 1, slope)[..., None])
        # The weighted sum of a row without keys is 0 * NaN if a value is NaN: replace it by 0.
        output = jnp.where(empty[..., None], 0, weighted / divisor[..., None])
        shift = self.shift._replace(reference=jnp.where(empty, 0, self.shift.reference))
        return FinalRows(output, summary, shift, empty, divisor, mean)


class FinalRows(NamedTuple):
    """The results of t rows, and the numbers from which their weights are recomputed."""

    output: Array  # [t, Dv]
    summary: RowSummary | None  # [t]; None unless the weights are a softmax
    shift: RowShift
    empty: Array  # bool [t], whether all weights are 0: the row then sends no gradient
    divisor: Array  # [t] divides the weights of shifted logits: n for softmax
    # [t, Dv] sum_j s_j v_j / sum_j s_j with the slopes s of the weights; None without a search.
    mean_by_slopes: Array | None
