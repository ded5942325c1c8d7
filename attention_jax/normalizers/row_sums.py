"""`RowSums`: the sums over the keys so far of rows whose keys arrive in tiles.

The weights of a tile are those of logits that are shifted by two numbers of each row. Where a
search has found the threshold, or where it is 0, the shift is known before the first key, and the
tiles' sums add up. For softmax the shift is M, the largest of the logits x_j so far (the *online
softmax*), and the sums are

    total = sum_j exp(x_j - M),    weighted = sum_j exp(x_j - M) v_j,
    excess = sum_j exp(x_j - M) (x_j - M).

When M rises by r, the first two shrink by exp(-r), and excess becomes exp(-r) (excess - r total).
At the end, output = weighted / total; `row_summary` has the rest. The results do not depend on M,
so it needs no gradient.

Source: Milakov and Gimelshein 2018, algorithm 3; Rabe and Staats 2021, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.products import einsum
from attention_jax.normalizers.family import Family
from attention_jax.normalizers.row_summary import RowSummary

Array = jax.Array


class RowShift(NamedTuple):
    """The numbers that are subtracted from the logits of each row.

    They are two, because their sum would be rounded: at logits of 1e4, to 1e-3 in float32.
    """

    reference: Array  # [t] near the row's largest logit; +inf for a row without weights
    threshold: Array | None = None  # [t] subtracted next; None for 0

    def shifted(self, logits: Array) -> Array:
        """The logits [t, s] after the shift."""
        shifted = logits - self.reference[:, None]
        return shifted if self.threshold is None else shifted - self.threshold[:, None]


class FinalRows(NamedTuple):
    """The results of t rows, and the numbers from which their weights are recomputed."""

    output: Array  # [t, Dv]
    summary: RowSummary | None  # [t]; None for other weights than those of softmax
    shift: RowShift
    empty: Array  # bool [t], whether all weights are 0: the row then sends no gradient
    divisor: Array | None  # [t] divides the weights of shifted logits; None for 1
    mean: Array | None  # [t, Dv] of the contract; None if it is the output, or 0


class RowSums(NamedTuple):
    """The sums over the keys so far, for t rows (queries)."""

    shift: RowShift  # [t]; of softmax the largest logit, -inf before the first key
    total: Array  # [t] sum of the weights
    weighted: Array  # [t, Dv] sum of weight times value
    excess: Array | None = None  # [t] sum of weight times shifted logit, for an entropy
    slopes: tuple[Array, Array] | None = None  # [t], [t, Dv]: the same with slopes s, for a mean

    @classmethod
    def empty(
        cls, normalizer: Any, rows: int, value_dim: int, dtype: Any, *, entropy: bool
    ) -> RowSums:
        """The sums before the first key.

        Args:
            normalizer: the `Normalizer`.
            rows: t.
            value_dim: Dv.
            dtype: the compute dtype.
            entropy: whether a softmax sums what its entropy needs.
        """
        family = normalizer.family
        searched = family.sums_to_one and not family.is_softmax
        zeros, vectors = jnp.zeros(rows, dtype), jnp.zeros((rows, value_dim), dtype)
        return cls(
            RowShift(zeros - jnp.inf if family.is_softmax else zeros, zeros if searched else None),
            zeros,
            vectors,
            zeros if entropy and family.is_softmax else None,
            (zeros, vectors) if searched else None,
        )

    def update(
        self,
        family: Family,
        logits: Array,
        values: Array,
        factors_of_values: Callable[[Array], Array],
    ) -> RowSums:
        """The sums after s more keys.

        Args:
            family: makes the weights of shifted logits.
            logits: transformed logits [t, s], -inf where masked.
            values: [s, Dv].
            factors_of_values: takes weights [t, s] and returns what multiplies the values: those
                that dropout keeps, and damped.
        """

        def sums(weights: Array) -> tuple[Array, Array]:
            total = jnp.sum(weights, axis=1)
            return total, einsum("ts,sd->td", factors_of_values(weights), values)

        if family.normalizer.is_softmax:
            return self._with_larger_shift(logits, sums)
        old, shifted = (self.total, self.weighted), self.shift.shifted(logits)
        if self.slopes is None:
            total, weighted = jax.tree.map(jnp.add, old, sums(family.weight(shifted)))
            return self._replace(total=total, weighted=weighted)
        tile = tuple(map(sums, family.weights_and_slopes(shifted)))
        (total, weighted), slopes = jax.tree.map(jnp.add, (old, self.slopes), tile)
        return RowSums(self.shift, total, weighted, None, slopes)

    def _with_larger_shift(
        self, logits: Array, sums: Callable[[Array], tuple[Array, Array]]
    ) -> RowSums:
        old = self.shift.reference
        largest = jnp.maximum(old, jax.lax.stop_gradient(jnp.max(logits, axis=1)))
        reference = jnp.where(largest == -jnp.inf, 0, largest)  # -inf - (-inf) would be NaN
        shrink = jnp.exp(old - reference)
        shifted = logits - reference[:, None]
        exponentials = jnp.exp(shifted)
        total, weighted = sums(exponentials)
        excess = self.excess
        if excess is not None:
            # A term with exponential 0 is 0: 0 * -inf would be NaN. (`shifted` is -inf for masked
            # keys, and by overflow for keys whose bias is the lowest float. `old` is -inf before
            # the first key.)
            terms = exponentials * jnp.where(exponentials > 0, shifted, 0)
            drop = jnp.where(shrink > 0, old - reference, 0)
            excess = shrink * (excess + drop * self.total) + jnp.sum(terms, axis=1)
        return RowSums(
            RowShift(largest),
            shrink * self.total + total,
            shrink[:, None] * self.weighted + weighted,
            excess,
        )

    def finalize(self, normalizer: Any) -> FinalRows:
        """The results after the last key."""
        empty = self.total == 0
        output, summary, divisor, mean = self.weighted, None, None, None
        if normalizer.family.is_softmax:
            divisor = jnp.where(empty, 1, self.total)
            output = output / divisor[:, None]
            summary = RowSummary.of_sums(self.shift.reference, self.total, self.excess)
        if self.slopes is not None:
            total, sloped = self.slopes
            flat = empty | (total == 0)  # at the corner of a rectified line all slopes may be 0
            mean = jnp.where(flat[:, None], 0, sloped / jnp.where(flat, 1, total)[:, None])
        # The weighted sum of a row without keys is 0 * NaN if a value is NaN: replace it by 0.
        output = jnp.where(empty[:, None], 0, output)
        shift = self.shift._replace(reference=jnp.where(empty, jnp.inf, self.shift.reference))
        return FinalRows(output, summary, shift, empty, divisor, mean)
