"""The checkpointed tile loop that JAX differentiates: `tiled`'s twin, for all but reverse mode.

It is a map over tiles of queries around a scan over tiles of keys. When JAX differentiates the two
bodies, it recomputes them instead of saving their intermediate arrays (`jax.checkpoint`). The
loop has no gradient rule by hand, and a rule that a score has for `pair` (additive attention has
one) composes with every transformation. So every derivative exists, in any mode and order, in
linear memory. In reverse mode it is slower than the hand-written backward pass of `tiled`.

Source: Rabe and Staats 2021, section 3 (the same two levels of checkpointing).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.normalizers.contract import BoundNormalizer
from attention_jax.normalizers.fold import RowSums, sums_over_keys
from attention_jax.normalizers.softmax_rows import RowSummary
from attention_jax.tiles.prepare import Arrays, Plan, key_tile_loops, repeated
from attention_jax.tiles.tile import Tile, empty_sums

Array = jax.Array


def attend_tiles(plan: Plan, arrays: Arrays) -> tuple[Array, RowSummary | None]:
    """Output [query_tiles, t, Dv], and the summary of rows [query_tiles, t], as in `tiled`."""
    # A derivative with respect to a 16-bit array would be summed over the tiles in 16 bits.
    wide = cast_floats(tuple(arrays[:4]), plan.dtype)
    arrays = arrays._replace(**dict(zip(arrays._fields, wide, strict=False)))

    # Each tile of queries consists of its index, its features and its rows of the bias tables.
    tables = [repeated(table, plan.query_tiles) for table in arrays.shared.biases.tables]
    of_tiles = jnp.arange(plan.query_tiles), arrays.queries, tables

    def one_round(arrays: Arrays, of_keys: None, sums: RowSums) -> tuple[None, RowSums]:
        @jax.checkpoint
        def one_query_tile(slices: Any) -> RowSums:
            return _add_keys(plan, arrays, *slices)

        return of_keys, jax.lax.map(one_query_tile, (*of_tiles, sums))

    if plan.ring is not None:
        one_round = jax.checkpoint(one_round)
    _, sums = plan.over_rounds(arrays, None, empty_sums(plan, arrays), one_round)
    rows = sums.finalize(plan.options.normalizer)
    return rows.output, rows.summary


def _add_keys(
    plan: Plan, arrays: Arrays, i: Array, queries: Any, tables: list[Array], sums: RowSums
) -> RowSums:
    """The sums of the i-th tile of queries after the keys of `arrays`, as in `tiled`."""
    bound = BoundNormalizer(plan.options.normalizer, arrays.shared.normalizer_params)
    order, loops = key_tile_loops(plan, arrays.schedule, i)
    *_, (*_, visited) = loops
    # The scan takes keys tile by tile, so that their gradient is computed tile by tile. An index
    # into all keys would give a gradient of the size of all keys in every step.
    keys, values = jax.tree.map(lambda tiles: tiles[order], (arrays.keys, arrays.values))
    tables = [repeated(table, plan.key_tiles)[order] for table in tables]
    key_tiles = (jnp.arange(plan.key_tiles), order, keys, values, tables)

    def over_keys(add: Callable[..., Any], carry: Any) -> Any:
        @jax.checkpoint
        def one_key_tile(carry: Any, key_tile: Any) -> tuple[Any, None]:
            n, *rest = key_tile
            return jax.lax.cond(n < visited, add_tile, lambda carry, *_: carry, carry, *rest), None

        def add_tile(carry: Any, j: Array, keys: Any, values: Array, tables: list[Array]) -> Any:
            # The tile of each table, as a table of a single tile.
            shared = arrays.shared
            biases = shared.biases._replace(tables=tuple(table[None, None] for table in tables))
            of_tile = arrays._replace(shared=shared._replace(biases=biases))
            tile = Tile(plan, of_tile, i, j, arrays.mask is not None)
            logits = tile.logits(queries, keys, differentiable=True)
            logits = bound.transform(logits, tile.num_keys)
            return add(carry, logits, values, tile.factors_of_values)

        return jax.lax.scan(one_key_tile, carry, key_tiles)[0]

    return sums_over_keys(sums, bound, over_keys, plan.padded_lengths[1])
