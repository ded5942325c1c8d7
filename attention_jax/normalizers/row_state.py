"""The state of rows whose keys arrive in tiles: sums over the keys so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import export

from attention_jax.core.products import einsum

Array = jax.Array


class AttentionStatistics(NamedTuple):
    """Statistics of each row of attention, that is of each query."""

    logsumexp: Array  # [*B, T]  log sum_j exp(logits_j) over allowed keys; -inf without keys
    entropy: Array  # [*B, T]  -sum_j w_j log w_j in nats, before dropout; 0 without keys
    max_logit: Array  # [*B, T]  largest allowed logit, without gradient; -inf without keys


export.register_namedtuple_serialization(
    AttentionStatistics, serialized_name="attention_jax.AttentionStatistics"
)


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
    statistics: AttentionStatistics | None  # [t]
    shift: RowShift
    empty: Array  # bool [t], whether all weights are 0: the row then sends no gradient
    divisor: Array | None = None  # [t] divides the weights of `tile_weights`; None for 1
    mean: Array | None = None  # [t, Dv] of the contract; None if it is the output, or 0


class RowState(Protocol):
    """The state of a normaliser for t rows: a NamedTuple of arrays [t, ...]."""

    def update(
        self,
        normalizer: Any,
        params: Any,
        logits: Array,
        values: Array,
        factors_of_values: Callable[[Array], Array],
    ) -> RowState:
        """The state after s more keys.

        Args:
            normalizer: the `Normalizer`.
            params: its parameters.
            logits: transformed logits [t, s], -inf where masked.
            values: [s, Dv].
            factors_of_values: takes weights [t, s] and returns what multiplies the values: those
                that dropout keeps, and damped.
        """

    def finalize(self, normalizer: Any, params: Any) -> FinalRows:
        """The results after the last key."""


class ElementwiseState(NamedTuple):
    """The sums over the keys so far of weights whose shift is known."""

    shift: RowShift  # [t]
    total: Array  # [t] sum of the weights
    weighted: Array  # [t, Dv] sum of weight times value
    slopes: Array | None  # [t] sum of the slopes s; None for weights that do not sum to 1
    sloped: Array | None  # [t, Dv] sum of slope times value

    @classmethod
    def empty(cls, rows: int, value_dim: int, dtype: Any, *, slopes: bool) -> ElementwiseState:
        """The state before the first key, with shift 0."""
        zeros, vectors = jnp.zeros(rows, dtype), jnp.zeros((rows, value_dim), dtype)
        shift = RowShift(zeros, zeros if slopes else None)
        return cls(shift, zeros, vectors, *((zeros, vectors) if slopes else (None, None)))

    def update(
        self,
        normalizer: Any,
        params: Any,
        logits: Array,
        values: Array,
        factors_of_values: Callable[[Array], Array],
    ) -> ElementwiseState:
        def weighted_sum(factors: Array) -> Array:
            return einsum("ts,sd->td", factors_of_values(factors), values)

        shifted = self.shift.shifted(logits)
        if self.slopes is None:
            weights = normalizer.safe_weight(params, shifted)
            slopes, sloped = None, None
        else:
            assert self.sloped is not None
            weights, tile_slopes = weights_and_slopes(normalizer, params, shifted)
            slopes = self.slopes + jnp.sum(tile_slopes, axis=1)
            sloped = self.sloped + weighted_sum(tile_slopes)
        total = self.total + jnp.sum(weights, axis=1)
        weighted = self.weighted + weighted_sum(weights)
        return ElementwiseState(self.shift, total, weighted, slopes, sloped)

    def finalize(self, normalizer: Any, params: Any) -> FinalRows:
        del normalizer, params
        any_weight = self.total != 0  # `> 0` would hide a NaN
        # The weighted sum of a row without keys is 0 * NaN if a value is NaN: replace it by 0.
        output = jnp.where(any_weight[:, None], self.weighted, 0)
        mean = None
        if self.slopes is not None:
            assert self.sloped is not None
            # At the corner of a rectified line all slopes may be 0.
            sloped = any_weight & (self.slopes != 0)
            slopes = jnp.where(sloped, self.slopes, 1)
            mean = jnp.where(sloped[:, None], self.sloped / slopes[:, None], 0)
        reference = jnp.where(any_weight, self.shift.reference, jnp.inf)
        shift = self.shift._replace(reference=reference)
        return FinalRows(output, None, shift, ~any_weight, mean=mean)


def weights_and_slopes(normalizer: Any, params: Any, shifted: Array) -> tuple[Array, Array]:
    """The weights of shifted logits, and their derivatives."""

    def weight(shifted: Array) -> Array:
        return normalizer.safe_weight(params, shifted)

    return jax.jvp(weight, (shifted,), (jnp.ones_like(shifted),))
