"""Softmax of a row whose keys come in pieces, and the sum of the values that it weights.

Over the keys so far, with M the largest of their logits x_j, a `SoftmaxState` holds

    normalizer = sum_j exp(x_j - M),    weighted = sum_j exp(x_j - M) v_j,
    excess = sum_j exp(x_j - M) (x_j - M).

When M rises by r, the first two shrink by exp(-r), and excess becomes exp(-r) (excess - r
normalizer). At the end

    output = weighted / normalizer,    logsumexp = M + log normalizer,
    entropy = log normalizer - excess / normalizer.

M only scales; no result depends on it, so it has no gradient.

Source: Milakov and Gimelshein 2018, algorithm 3; Rabe and Staats 2021, section 2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.pairwise import dropout

Array = jax.Array


class SoftmaxState(NamedTuple):
    """The sums over the keys so far, for t rows (queries)."""

    largest: Array  # [t] M; -inf before the first key
    normalizer: Array  # [t]
    weighted: Array  # [t, Dv]
    excess: Array | None  # [t]; None without statistics

    @classmethod
    def empty(
        cls, rows: int, value_dim: int, dtype: jnp.dtype, *, statistics: bool
    ) -> SoftmaxState:
        """The state before the first key."""
        zeros = jnp.zeros(rows, dtype)
        return cls(
            largest=jnp.full(rows, -jnp.inf, dtype),
            normalizer=zeros,
            weighted=jnp.zeros((rows, value_dim), dtype),
            excess=zeros if statistics else None,
        )

    def update(
        self, logits: Array, values: Array, keep: Array | None, dropout_rate: float
    ) -> SoftmaxState:
        """The state after s more keys.

        Args:
            logits: [t, s], -inf where masked.
            values: [s, Dv].
            keep: bool [t, s], which weights dropout keeps; None for all.
            dropout_rate: probability that a weight is dropped.
        """
        tile_largest = jax.lax.stop_gradient(jnp.max(logits, axis=1))
        largest = jnp.maximum(self.largest, tile_largest)
        reference = jnp.where(largest == -jnp.inf, 0, largest)  # -inf - (-inf) would be NaN
        shrink = jnp.exp(self.largest - reference)

        shifted = logits - reference[:, None]
        exponentials = jnp.exp(shifted)
        kept = exponentials
        if keep is not None:
            kept = dropout.drop(exponentials, keep, dropout_rate)
        normalizer = shrink * self.normalizer + jnp.sum(exponentials, axis=1)
        weighted = shrink[:, None] * self.weighted + jnp.matmul(kept, values, precision="highest")
        excess = self.excess
        if excess is not None:
            # Where the exponential is 0, so is the term: 0 * -inf would be NaN. (A logit is -inf
            # before the first key, and by overflow after keys whose bias is the lowest float.)
            terms = exponentials * jnp.where(exponentials > 0, shifted, 0)
            drop = jnp.where(shrink > 0, self.largest - reference, 0)
            excess = shrink * (excess + drop * self.normalizer) + jnp.sum(terms, axis=1)
        return SoftmaxState(largest, normalizer, weighted, excess)

    def finalize(self) -> tuple[Array, AttentionStatistics | None]:
        """Output [t, Dv], and the statistics [t] if the state has them."""
        any_allowed = self.normalizer != 0  # and not `> 0`, which would hide a NaN
        normalizer = jnp.where(any_allowed, self.normalizer, 1)
        # Not the sum itself: it holds a NaN that another row may see, as 0 * NaN.
        output = jnp.where(any_allowed[:, None], self.weighted / normalizer[:, None], 0)
        if self.excess is None:
            return output, None
        log_normalizer = jnp.log(normalizer)
        return output, AttentionStatistics(
            logsumexp=jnp.where(any_allowed, log_normalizer + self.largest, -jnp.inf),
            entropy=jnp.where(any_allowed, log_normalizer - self.excess / normalizer, 0),
            max_logit=self.largest,
        )
