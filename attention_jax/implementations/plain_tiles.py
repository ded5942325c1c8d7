"""The checkpointed tile loop that JAX differentiates: the twin of `tiled` for higher derivatives.

It is a map over tiles of queries around a scan over tiles of keys. When JAX differentiates the two
bodies, it recomputes them instead of saving their intermediate arrays (`jax.checkpoint`). No part
has a custom gradient rule. So every derivative exists, in any mode and order, in linear memory. In
reverse mode it is slower than the hand-written backward pass of `tiled`.

Source: Rabe and Staats 2021, section 3 (the same two levels of checkpointing).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.implementations import bias_tiles, tiling
from attention_jax.implementations.online_softmax import SoftmaxState
from attention_jax.implementations.rounds import map_query_tiles
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.implementations.tiling import Arrays, Constants, Plan

Array = jax.Array


def attend_tiles(
    plan: Plan, arrays: Arrays, constants: Any
) -> tuple[Array, AttentionStatistics | None]:
    """Output [query_tiles, t, Dv], and statistics [query_tiles, t] if they are requested."""

    def attend(constants: Constants, keys_and_values, tile, state: SoftmaxState) -> SoftmaxState:
        keys, values = keys_and_values
        i, queries, tables = tile
        arrays_of_round = arrays._replace(keys=keys, values=values)
        return _attend_to_keys(plan, arrays_of_round, constants, i, queries, tables, state)

    # Each tile of queries consists of its index, its features and its rows of the bias tables.
    tables = [_repeated(table, plan.query_tiles) for table in arrays.biases.tables]
    return map_query_tiles(
        plan.ring,
        constants,
        (arrays.keys, arrays.values),
        (jnp.arange(plan.query_tiles), arrays.queries, tables),
        start=lambda: tiling.empty_state(plan, arrays),
        attend=attend,
        finish=SoftmaxState.finalize,
        recompute=True,
    )


def _attend_to_keys(
    plan: Plan,
    arrays: Arrays,
    constants: Constants,
    i: Array,
    queries: Any,
    tables: list[Array],
    state: SoftmaxState,
) -> SoftmaxState:
    """The state of one tile of queries after all tiles of keys in `arrays`."""
    order = jnp.arange(plan.key_tiles)
    visited = jnp.asarray(plan.key_tiles)
    if constants.schedule is not None:
        order, visited = constants.schedule.order[i], constants.schedule.visited[i]

    @jax.checkpoint
    def visit(state, key_tile):
        n, j, keys, values, tables = key_tile

        def compute(state):
            allowed = None
            if constants.mask is not None:
                allowed = tiling.allowed_pairs(plan, constants.mask, i, j)
            logits = tiling.pair_logits(
                plan, arrays.params, queries, keys, allowed, constants.stand_ins
            ).astype(values.dtype)
            # The tile of each table, as a table of a single tile.
            biases = arrays.biases._replace(tables=tuple(table[None, None] for table in tables))
            bias = bias_tiles.tile_values(biases, constants.bias_integers, plan.grid, i, j)
            if bias is not None:
                logits = logits + bias
            if allowed is not None:
                logits = jnp.where(allowed, logits, -jnp.inf)
            keep = tiling.kept_pairs(plan, constants, i, j)
            return state.update(logits, values, keep, plan.options.dropout_rate)

        return jax.lax.cond(n < visited, compute, lambda state: state, state), None

    # The scan takes keys tile by tile, so that their gradient is computed tile by tile. An index
    # into all keys would give a gradient of the size of all keys in every step.
    keys, values = jax.tree.map(lambda tiles: tiles[order], (arrays.keys, arrays.values))
    tables = [_repeated(table, plan.key_tiles)[order] for table in tables]
    key_tiles = (jnp.arange(plan.key_tiles), order, keys, values, tables)
    state, _ = jax.lax.scan(visit, state, key_tiles)
    return state


def _repeated(tiles: Array, count: int) -> Array:
    """Broadcasts a leading axis of size 1 to `count` tiles."""
    return jnp.broadcast_to(tiles, (count, *tiles.shape[1:]))
