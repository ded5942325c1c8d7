"""The work on one tile of t queries and s keys: its logits, and the factors of its values.

`tiled` and its twin `plain_tiles` loop over tiles in different ways, and do the same on each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.normalizers.contract import transformed
from attention_jax.normalizers.rows import RowSums
from attention_jax.positions import dropout
from attention_jax.tiles import bias_tiles
from attention_jax.tiles.prepare import Arrays
from attention_jax.tiles.rounds import Plan
from attention_jax.tiles.stand_ins import pair_with_stand_ins

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
        return self.plan.allowed(self.arrays.mask, self.i, self.j) if self.masked else None

    def logits(self, queries: Any, keys: Any, *, differentiable: bool = False) -> Array:
        """The logits [t, s] with the bias, -inf where masked.

        Args:
            queries: features [t, Fq].
            keys: features [s, Fk].
            differentiable: whether JAX differentiates the result; stand-ins then replace masked
                pairs, see `scores.stand_ins`.
        """
        arrays, allowed, score = self.arrays, self.allowed(), self.plan.options.score
        stand_ins = arrays.stand_ins if differentiable else None
        logits = pair_with_stand_ins(score, arrays.params, queries, keys, allowed, stand_ins)
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
            keep = self.plan.allowed(self.arrays.dropout_mask, self.i, self.j)
            weights = dropout.drop(weights, keep, self.plan.options.dropout_rate)
        damping = bias_tiles.tile_values(self.arrays.damping, self.plan, self.i, self.j)
        return weights if damping is None else weights * jnp.exp(damping)


def empty_sums(plan: Plan, arrays: Arrays) -> RowSums:
    """The sums of a tile of queries before its first key."""
    zeros = jnp.zeros((plan.tile.query, arrays.values.shape[-1]), arrays.compute_dtype)
    statistics = plan.options.return_statistics
    return varying_as(RowSums.empty(plan.options.normalizer, zeros, entropy=statistics), arrays)
