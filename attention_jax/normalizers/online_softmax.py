"""Online softmax: the softmax of rows whose keys arrive in tiles, and the weighted sum of values.

With M the largest of the logits x_j of the keys so far, a `SoftmaxState` holds

    normalizer = sum_j exp(x_j - M),    weighted = sum_j exp(x_j - M) v_j,
    excess = sum_j exp(x_j - M) (x_j - M).

When M rises by r, the first two shrink by exp(-r), and excess becomes exp(-r) (excess - r
normalizer). At the end

    output = weighted / normalizer,    logsumexp = M + log normalizer,
    entropy = log normalizer - excess / normalizer.

The results do not depend on M, so it needs no gradient. A sink is one more key, with value 0. Its
logit may be so large that all other exponentials are 0, so the largest logit of a key is kept too.

Source: Milakov and Gimelshein 2018, algorithm 3; Rabe and Staats 2021, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.products import einsum
from attention_jax.normalizers.row_state import AttentionStatistics, FinalRows, RowShift

Array = jax.Array


class SoftmaxState(NamedTuple):
    """The sums over the keys so far, for t rows (queries)."""

    largest: Array  # [t] M; before the first key -inf, or the logit of the sink
    normalizer: Array  # [t] without the sink
    weighted: Array  # [t, Dv]
    excess: Array | None  # [t]; None without statistics
    largest_of_keys: Array | None = None  # [t] M without the sink; None if there is no sink

    @classmethod
    def empty(
        cls,
        rows: int,
        value_dim: int,
        dtype: jnp.dtype,
        *,
        statistics: bool,
        sink: Array | None = None,
    ) -> SoftmaxState:
        """The state before the first key; `sink` is the logit [] of a sink."""
        zeros = jnp.zeros(rows, dtype)
        largest, largest_of_keys = jnp.full(rows, -jnp.inf, dtype), None
        if sink is not None:
            largest_of_keys, largest = largest, zeros + jax.lax.stop_gradient(sink)
        return cls(
            largest=largest,
            normalizer=zeros,
            weighted=jnp.zeros((rows, value_dim), dtype),
            excess=zeros if statistics else None,
            largest_of_keys=largest_of_keys,
        )

    def update(
        self,
        normalizer: Any,
        params: Any,
        logits: Array,
        values: Array,
        factors_of_values: Callable[[Array], Array],
    ) -> SoftmaxState:
        del normalizer, params
        tile_largest = jax.lax.stop_gradient(jnp.max(logits, axis=1))
        largest = jnp.maximum(self.largest, tile_largest)
        reference = jnp.where(largest == -jnp.inf, 0, largest)  # -inf - (-inf) would be NaN
        shrink = jnp.exp(self.largest - reference)

        shifted = logits - reference[:, None]
        exponentials = jnp.exp(shifted)
        normalizer = shrink * self.normalizer + jnp.sum(exponentials, axis=1)
        weighted = shrink[:, None] * self.weighted + einsum(
            "ts,sd->td", factors_of_values(exponentials), values
        )
        excess = self.excess
        if excess is not None:
            # A term with exponential 0 is 0: 0 * -inf would be NaN. (`shifted` is -inf for masked
            # keys, and by overflow for keys whose bias is the lowest float. `self.largest` is -inf
            # before the first key.)
            terms = exponentials * jnp.where(exponentials > 0, shifted, 0)
            drop = jnp.where(shrink > 0, self.largest - reference, 0)
            excess = shrink * (excess + drop * self.normalizer) + jnp.sum(terms, axis=1)
        largest_of_keys = self.largest_of_keys
        if largest_of_keys is not None:
            largest_of_keys = jnp.maximum(largest_of_keys, tile_largest)
        return SoftmaxState(largest, normalizer, weighted, excess, largest_of_keys)

    def finalize(self, normalizer: Any, params: Any) -> FinalRows:
        any_allowed = self.normalizer != 0  # `> 0` would hide a NaN
        if self.largest_of_keys is not None:
            any_allowed = self.largest_of_keys != -jnp.inf
        total, excess = self.normalizer, self.excess
        sink = normalizer.sink_logit(params)
        if sink is not None:
            shifted = sink - self.largest
            weight = jnp.exp(shifted)
            total = total + weight
            if excess is not None:
                excess = excess + weight * jnp.where(weight > 0, shifted, 0)
        divisor = jnp.where(any_allowed, total, 1)
        # The weighted sum of a row without keys is 0 * NaN if a value is NaN: replace it by 0.
        output = jnp.where(any_allowed[:, None], self.weighted / divisor[:, None], 0)
        statistics = None
        if excess is not None:
            log_total = jnp.log(divisor)
            statistics = AttentionStatistics(
                logsumexp=jnp.where(any_allowed, log_total + self.largest, -jnp.inf),
                entropy=jnp.where(any_allowed, log_total - excess / divisor, 0),
                max_logit=jnp.where(any_allowed, self.largest, -jnp.inf),
            )
        shift = RowShift(jnp.where(any_allowed, self.largest, jnp.inf))
        return FinalRows(output, statistics, shift, ~any_allowed, divisor)
