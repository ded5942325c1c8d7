"""The work on one tile of t queries and s keys: its logits, the factors of its values, its biases.

The loops of `tiled` and of its twin differ, and do the same on each tile.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.normalizers.fold import RowSums
from attention_jax.positions.contract import Mask
from attention_jax.positions.dropout import drop
from attention_jax.tiles.features import pair_logits
from attention_jax.tiles.prepare import Arrays, BiasTiles, Plan, tile_of

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile: where it is, and the arrays of all tiles."""

    plan: Plan
    arrays: Arrays
    i: Array  # of the tile of queries
    j: Array  # of the tile of keys
    masked: bool  # whether the mask may hide pairs of the tile

    @functools.cached_property
    def positions(self) -> tuple[Array, Array]:
        """The positions of the queries and of the keys, int [t] and [s]."""
        return self.plan.positions(self.i, self.j)

    @functools.cached_property
    def allowed(self) -> Array | None:
        """The mask, bool [t, s]; None if it hides no pair."""
        return self._values_of(self.arrays.mask) if self.masked else None

    @property
    def keys_and_values(self) -> tuple[Any, Array]:
        """The features [s, Fk] of the keys, and the values [s, Dv]."""
        return tile_of((self.arrays.keys, self.arrays.values), self.j)

    def logits(self, queries: Any, keys: Any, *, differentiable: bool = False) -> Array:
        """The logits [t, s] with the bias, -inf where masked.

        Args:
            queries: features [t, Fq].
            keys: features [s, Fk].
            differentiable: whether JAX differentiates the result; stand-ins then replace masked
                pairs, see `features.py`.
        """
        arrays, allowed, score = self.arrays, self.allowed, self.plan.options.score
        stand_ins = arrays.stand_ins if differentiable else None
        logits = pair_logits(score, arrays.shared.params, queries, keys, allowed, stand_ins)
        logits = logits.astype(self.plan.dtype)
        bias = self.bias_of(arrays.shared.biases)
        if bias is not None:
            logits = logits + bias.astype(logits.dtype)
        return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)

    @property
    def num_keys(self) -> Array | None:
        """The keys [t] that each query may attend to, if the normaliser reads their number."""
        return tile_of(self.arrays.num_keys, self.i)

    def factors_of_values(self, weights: Array) -> Array:
        """The weights [t, s] after dropout and damping, as they multiply the values."""
        if self.arrays.dropout_mask is not None:
            weights = drop(weights, self._kept, self.plan.options.dropout_rate)
        damping = self.bias_of(self.arrays.shared.damping)
        return weights if damping is None else weights * jnp.exp(damping)

    @functools.cached_property
    def _kept(self) -> Array:
        """The weights that dropout keeps, bool [t, s]."""
        return self._values_of(self.arrays.dropout_mask)

    def _values_of(self, mask: Mask | None) -> Array:
        assert mask is not None
        return jnp.broadcast_to(mask.at(*self.positions), self.plan.tile)

    # --- biases ---

    def bias_of(self, biases: BiasTiles) -> Array | None:
        """The sum of all summands, [t or 1, s or 1]; None if there are no summands."""
        values = [tile_of(tile_of(table, self.i), self.j) for table in biases.tables]
        values += self._values_of_functions(biases.functions)
        return sum(values[1:], start=values[0]) if values else None

    def _values_of_functions(self, functions: Any) -> list[Array]:
        """The values [t, s] of each function of position."""
        positions, shape = self.positions if functions else (), self.plan.tile
        return [jnp.broadcast_to(function.at(*positions), shape) for function in functions]

    def add_bias_gradient(self, dbiases: BiasTiles, biases: BiasTiles, dlogits: Array) -> BiasTiles:
        """Adds the gradients that `dlogits` [t, s] send to the biases to `dbiases`."""

        def add(total: Array, gradient: Array) -> Array:
            return total if gradient.dtype == jax.dtypes.float0 else total + gradient

        def add_to_table(dtable: Array) -> Array:
            """Adds to this tile of the table's gradient, summed over broadcast axes."""
            gradient = dlogits
            for axis in (0, 1):
                if dtable.shape[2 + axis] == 1:
                    gradient = jnp.sum(gradient, axis=axis, keepdims=True)
            row = 0 if dtable.shape[0] == 1 else self.i
            column = 0 if dtable.shape[1] == 1 else self.j
            return add_at(dtable, (row, column), gradient)

        tables = tuple(map(add_to_table, dbiases.tables))
        values, pull_back = jax.vjp(self._values_of_functions, biases.functions)
        (gradients,) = pull_back([dlogits.astype(each.dtype) for each in values])
        return BiasTiles(tables, jax.tree.map(add, dbiases.functions, gradients))


def empty_sums(plan: Plan, arrays: Arrays) -> RowSums:
    """The sums of all tiles of queries before their first key, [query_tiles, t, ...]."""
    options, zeros = plan.options, jnp.zeros((plan.tile[0], arrays.values.shape[-1]), plan.dtype)
    sums = RowSums.empty(options.normalizer, zeros, entropy=options.return_statistics)
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (plan.query_tiles, *leaf.shape)),
        varying_as(sums, arrays),
    )


def add_at(tiles: Array, index: tuple, addend: Array) -> Array:
    """`tiles.at[index].add(addend)` as an update of a slice, which needs no check of bounds."""
    start = (*index, *[0] * addend.ndim)
    shape, never = (*[1] * len(index), *addend.shape), {"allow_negative_indices": False}
    old = jax.lax.dynamic_slice(tiles, start, shape, **never)
    return jax.lax.dynamic_update_slice(tiles, old + addend.reshape(shape), start, **never)
