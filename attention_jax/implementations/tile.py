"""One tile of t queries and s keys: its logits, its weights, and the sums of a row over its tiles.

`tiled` and its twin `plain_tiles` loop over tiles in different ways; the work on a tile is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.implementations import bias_tiles
from attention_jax.implementations.rounds import Plan
from attention_jax.implementations.tiling import Arrays, allowed_pairs
from attention_jax.normalizers.contract import family_of, transformed
from attention_jax.normalizers.rows import RowSums
from attention_jax.normalizers.threshold import find_shift, num_visits
from attention_jax.pairwise import dropout
from attention_jax.scores.stand_ins import pair_with_stand_ins

Array = jax.Array


class Tile(NamedTuple):
    """One tile: where it is, and the arrays of all tiles."""

    plan: Plan
    arrays: Arrays
    i: Array  # of the tile of queries
    j: Array  # of the tile of keys
    masked: bool  # whether the mask may hide pairs of the tile

    def allowed(self) -> Array | None:
        """The mask, bool [t, s]; None if it hides no pair."""
        if not self.masked:
            return None
        return allowed_pairs(self.plan, self.arrays.mask, self.i, self.j)

    def logits(self, queries: Any, keys: Any, *, differentiable: bool = False) -> Array:
        """The logits [t, s] with the bias, -inf where masked.

        Args:
            queries: features [t, Fq].
            keys: features [s, Fk].
            differentiable: whether JAX differentiates the result; stand-ins then replace masked
                pairs, see `scores.stand_ins`.
        """
        arrays, allowed = self.arrays, self.allowed()
        replaced = allowed if differentiable else None
        score, params = self.plan.options.score, arrays.params
        logits = pair_with_stand_ins(score, params, queries, keys, replaced, arrays.stand_ins)
        logits = logits.astype(arrays.compute_dtype)
        bias = bias_tiles.tile_values(arrays.biases, self.plan, self.i, self.j)
        if bias is not None:
            logits = logits + bias.astype(logits.dtype)
        return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)

    def transformed(self, params: Any, logits: Array) -> Array:
        """The logits [t, s] as the normaliser transforms them with its parameters."""
        num_keys = self.arrays.num_keys
        num_keys = None if num_keys is None else num_keys[self.i]
        return transformed(self.plan.options.normalizer, params, logits, num_keys)

    def factors_of_values(self, weights: Array) -> Array:
        """The weights [t, s] after dropout and damping, as they multiply the values."""
        if self.arrays.dropout_mask is not None:
            keep = allowed_pairs(self.plan, self.arrays.dropout_mask, self.i, self.j)
            weights = dropout.drop(weights, keep, self.plan.options.dropout_rate)
        damping = bias_tiles.tile_values(self.arrays.damping, self.plan, self.i, self.j)
        return weights if damping is None else weights * jnp.exp(damping)


def add_keys(plan: Plan, arrays: Arrays, fold: Callable[..., Any], sums: RowSums) -> RowSums:
    """The sums of a tile of queries after more keys; with a search for thresholds, after all keys.

    Args:
        plan: the sizes and numbers of tiles.
        arrays: those of all tiles.
        fold: `fold(update, carry)` is the last carry after `carry = update(carry, logits, values,
            factors_of_values)` for each tile of keys, with transformed logits.
        sums: those before these keys.
    """
    family = family_of(plan.options.normalizer, arrays.normalizer_params)
    if num_visits(family.normalizer, arrays.compute_dtype):

        def fold_logits(update: Callable[[Any, Array], Any], carry: Any) -> Any:
            return fold(lambda carry, logits, *_: update(carry, logits), carry)

        zeros = sums.shift.reference
        sums = sums._replace(shift=find_shift(family, fold_logits, zeros, plan.padded_lengths[1]))
    return fold(lambda sums, *tile: sums.update(family, *tile), sums)
