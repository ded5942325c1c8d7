"""The checkpointed tile loop that JAX differentiates: `tiled`'s twin, for all but reverse mode.

It is a map over tiles of queries around a scan over tiles of keys. When JAX differentiates the two
bodies, it recomputes them instead of saving their intermediate arrays (`jax.checkpoint`). The
loop has no gradient rule by hand, and a rule that a score has for `pair` (additive attention has
one) composes with every transformation. So every derivative exists, in any mode and order, in
linear memory. In reverse mode it is slower than the hand-written backward pass of `tiled`.

Source: Rabe and Staats 2021, section 3 (the same two levels of checkpointing).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations.rounds import Plan, map_query_tiles
from attention_jax.implementations.tile import Tile, add_keys
from attention_jax.implementations.tile_arrays import repeated
from attention_jax.implementations.tiling import NUM_DIFFERENTIABLE, Arrays
from attention_jax.normalizers.rows import RowSummary, RowSums

Array = jax.Array


def attend_tiles(plan: Plan, arrays: Arrays) -> tuple[Array, RowSummary | None]:
    """Output [query_tiles, t, Dv], and the summary of rows [query_tiles, t], as in `tiled`."""

    # A derivative with respect to a 16-bit array would be summed over the tiles in 16 bits.
    floats, rest = arrays[:NUM_DIFFERENTIABLE], arrays[NUM_DIFFERENTIABLE:]
    fields: Any = *cast_floats(tuple(floats), arrays.compute_dtype), *rest
    arrays = Arrays(*fields)

    # Each tile of queries consists of its index, its features and its rows of the bias tables.
    tables = [repeated(table, plan.query_tiles) for table in arrays.biases.tables]
    tiles = jnp.arange(plan.query_tiles), arrays.queries, tables
    attend = functools.partial(_attend_to_keys, plan)
    rows = map_query_tiles(plan, arrays, tiles, attend, recompute=True)
    return rows.output, rows.summary


def _attend_to_keys(
    plan: Plan,
    arrays: Arrays,
    query_tile: tuple[Array, Any, list[Array]],
    sums: RowSums,
) -> RowSums:
    """The sums of one tile of queries after all tiles of these keys."""
    i, queries, tables = query_tile
    order = jnp.arange(plan.key_tiles)
    visited = jnp.asarray(plan.key_tiles)
    if arrays.schedule is not None:
        order, visited = arrays.schedule.order[i], arrays.schedule.visited[i]

    def fold(update, carry):
        """`carry = update(carry, logits, values, factors_of_values)` for each tile of keys."""

        @jax.checkpoint
        def visit(carry, key_tile):
            n, *rest = key_tile
            return jax.lax.cond(n < visited, compute, lambda carry, *_: carry, carry, *rest), None

        def compute(carry, j, keys, values, tables):
            # The tile of each table, as a table of a single tile.
            biases = arrays.biases._replace(tables=tuple(table[None, None] for table in tables))
            tile = Tile(plan, arrays._replace(biases=biases), i, j, arrays.mask is not None)
            logits = tile.logits(queries, keys, differentiable=True)
            logits = tile.transformed(arrays.normalizer_params, logits)
            return update(carry, logits, values, tile.factors_of_values)

        return jax.lax.scan(visit, carry, key_tiles)[0]

    # The scan takes keys tile by tile, so that their gradient is computed tile by tile. An index
    # into all keys would give a gradient of the size of all keys in every step.
    keys, values = jax.tree.map(lambda tiles: tiles[order], (arrays.keys, arrays.values))
    tables = [repeated(table, plan.key_tiles)[order] for table in tables]
    key_tiles = (jnp.arange(plan.key_tiles), order, keys, values, tables)

    return add_keys(plan, arrays, fold, sums)
