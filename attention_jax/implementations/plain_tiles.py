"""The tile loop under plain differentiation: what `tiled` takes all other derivatives from.

A map over tiles of queries, and in it a scan over tiles of keys; both bodies are recomputed, not
saved, when JAX differentiates them (`jax.checkpoint`). No part has a gradient rule of its own, and
JAX differentiates `pair`. So every derivative exists, in any mode and order, in linear memory; in
plain reverse mode it is slower than the hand-written backward pass.

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
    """Output [query_tiles, t, Dv], and statistics [query_tiles, t] if they are asked for."""

    def attend(constants: Constants, keys_and_values, tile, state: SoftmaxState) -> SoftmaxState:
        keys, values = keys_and_values
        i, queries, tables = tile
        here = arrays._replace(keys=keys, values=values)
        return _attend_to_keys(plan, here, constants, i, queries, tables, state)

    # Of each tile of queries its number, its features and its rows of the biases' tables.
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
    """The state of one tile of queries after all tiles of keys that are here."""
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
            # This tile of each table, which stands for all tiles of it.
            biases = arrays.biases._replace(tables=tuple(table[None, None] for table in tables))
            bias = bias_tiles.tile_values(biases, constants.bias_integers, plan.grid, i, j)
            if bias is not None:
                logits = logits + bias
            if allowed is not None:
                logits = jnp.where(allowed, logits, -jnp.inf)
            keep = tiling.kept_weights(plan, constants, i, j)
            return state.update(logits, values, keep, plan.options.dropout_rate)

        return jax.lax.cond(n < visited, compute, lambda state: state, state), None

    # Handed over tile by tile, so that the gradient comes tile by tile: through an index it would
    # be a table of all keys, added up in every step.
    keys, values = jax.tree.map(lambda tiles: tiles[order], (arrays.keys, arrays.values))
    tables = [_repeated(table, plan.key_tiles)[order] for table in tables]
    key_tiles = (jnp.arange(plan.key_tiles), order, keys, values, tables)
    state, _ = jax.lax.scan(visit, state, key_tiles)
    return state


def _repeated(tiles: Array, count: int) -> Array:
    """An axis of one tile as one of many."""
    return jnp.broadcast_to(tiles, (count, *tiles.shape[1:]))
