"""Attention whose queries come one after another, a chunk of queries at a time.

Something passes from each query to the next: a coverage, or the keys where walks have stopped. The
loop over chunks keeps, for the gradient, only what came into each chunk, and computes the rest of
the chunk again. With t queries per chunk that is memory S (T / t + c t) in place of c S T, and t
grows as the square root of T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.varying import varying_as
from attention_jax.implementations import bias_tiles
from attention_jax.implementations.bias_tiles import BiasTiles
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.implementations.tile_arrays import positions, untiled
from attention_jax.implementations.tiling import (
    Plan,
    allowed_pairs,
    in_tiles,
    plan_of,
    stand_ins_of,
)
from attention_jax.pairwise.masks import Mask, padding_mask
from attention_jax.scores import Params, Score, masked_pair

Array = jax.Array

SMALLEST_CHUNK = 64  # up to so many queries nothing is computed twice


class Chunk(NamedTuple):
    """t queries and all S keys, in the compute dtype; no NaN of a hidden token is in any of it."""

    params: Params
    queries: Any  # [t, Fq] as `project_query` made them, a pytree if it made one
    keys: Any  # [S, Fk]
    values: Array  # [S, Dv]
    bias: Array | None  # [t, S]
    allowed: Array | None  # bool [t, S], False for queries that only fill the last chunk
    positions: Array  # int [t], of the queries
    stand_ins: tuple[Any, Any] | None  # features in place of those of masked pairs


class Attended(NamedTuple):
    """What attention in order gives for one example."""

    output: Array  # [T, Dv] in the query's dtype; 0 for a query without keys
    weights: Array | None  # [T, S] in the query's dtype; None if they were not asked for
    rows: (
        Any  # further results of each query, [T, ...], 0 for a query without keys; None if T S = 0
    )
    carry: Any  # after the last query


def attend_in_order(
    score: Score,
    inputs: Inputs,
    weigh: Callable[[Chunk, Any], tuple[Any, Array, Any]],
    carry: Any,
    *,
    return_weights: bool,
) -> Attended:
    """Attention whose weights depend on the queries before, by `weigh` for each chunk in order.

    Args:
        score: the score; its projections run once.
        inputs: of one example.
        weigh: takes a chunk and the carry, and returns the next carry, the weights [t, S] (0 where
            masked), and further results of each row, [t, ...].
        carry: what comes into the first chunk.
        return_weights: whether to keep the weights of all queries.
    """
    dtype = inputs.query.dtype
    target_length, source_length = inputs.query.shape[0], inputs.key.shape[0]
    if 0 in (target_length, source_length):
        output = jnp.zeros((target_length, inputs.value.shape[-1]), dtype)
        weights = jnp.zeros((target_length, source_length), dtype) if return_weights else None
        return Attended(output, weights, None, carry)

    def attend(chunk: Chunk, carry: Any) -> tuple[Any, Any]:
        carry, weights, rows = weigh(chunk, carry)
        output = jnp.matmul(weights, chunk.values, precision="highest")
        if chunk.allowed is not None:
            # A NaN that another row may see is in that of a row without keys, as 0 * NaN.
            any_allowed = chunk.allowed.any(1)
            output = jnp.where(any_allowed[:, None], output, 0)
            rows = jax.tree.map(lambda row: jnp.where(any_allowed, row, 0), rows)
        kept = weights.astype(dtype) if return_weights else None
        return carry, (output.astype(dtype), kept, rows)

    carry, (output, weights, rows) = _scan_chunks(score, inputs, attend, carry)
    return Attended(output, weights, rows, carry)


def _scan_chunks(
    score: Score,
    inputs: Inputs,
    attend: Callable[[Chunk, Any], tuple[Any, Any]],
    carry: Any,
) -> tuple[Any, Any]:
    """`carry, results = attend(chunk, carry)` for each chunk of queries, in their order.

    Returns:
        the last carry, and the results of all queries, each [T, ...].
    """
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    size = max(SMALLEST_CHUNK, math.isqrt(lengths[0]))
    plan = plan_of(Options(score, BlockSizes(size, lengths[1])), *lengths)
    mask = inputs.mask
    if plan.query_tiles * plan.tile.query != lengths[0]:
        real = padding_mask(*map(jnp.asarray, lengths[::-1]))
        mask = real if mask is None else mask & real
    used = (None, None) if mask is None else _used_tokens(plan, mask)
    arrays, integers = in_tiles(plan, inputs, *used)
    keys, values = jax.tree.map(lambda tiles: tiles[0], (arrays.keys, arrays.values))
    instead = None if mask is None else stand_ins_of(inputs, plan.options)
    # Tables go into the loop row by row: the gradient of one that the loop reads as a whole would
    # be added up as a whole in every step.
    tables = [
        jnp.broadcast_to(table, (plan.query_tiles, *table.shape[1:]))
        for table in arrays.biases.tables
    ]

    first_key = jnp.asarray(0)

    def chunk(carry: Any, now: Any) -> tuple[Any, Any]:
        index, queries, tables = now
        biases = BiasTiles(tuple(table[None] for table in tables), arrays.biases.functions)
        bias = bias_tiles.tile_values(biases, integers, plan.grid, index, first_key)
        if bias is not None:
            bias = jnp.broadcast_to(bias, (plan.tile.query, lengths[1]))
        allowed = None if mask is None else allowed_pairs(plan, mask, index, first_key)
        where = positions(index, plan.tile.query)
        now = Chunk(arrays.params, queries, keys, values, bias, allowed, where, instead)
        return attend(now, carry)

    chunks = (jnp.arange(plan.query_tiles), arrays.queries, tables)
    body = chunk if plan.query_tiles == 1 else jax.checkpoint(chunk, prevent_cse=False)
    carry, results = _scan(body, carry, chunks)
    return carry, jax.tree.map(lambda tiles: untiled(tiles, lengths[0]), results)


def pair_logits(
    score: Score, chunk: Chunk, queries: Any, keys: Any, allowed: Array | None
) -> Array:
    """Logits [t, s] of the features of t queries and s keys.

    Args:
        score: the score.
        chunk: what its parameters and the stand-ins for masked pairs are taken from.
        queries: [t, Fq], some of the chunk's.
        keys: [s, Fk].
        allowed: bool [t, s]; None for all pairs.
    """
    logits = masked_pair(score, chunk.params, queries, keys, allowed, chunk.stand_ins)
    shape = tuple(jax.tree.leaves(features)[0].shape[0] for features in (queries, keys))
    if logits.shape != shape:
        raise ValueError(
            f"score {score} must give logits {list(shape)} of {shape[0]} queries and {shape[1]}"
            f" keys; got {list(logits.shape)}"
        )
    return logits


def _used_tokens(plan: Plan, mask: Mask) -> tuple[Array, Array]:
    """Bool [query_tiles * t] and [S]: which tokens an allowed pair contains."""

    def chunk(used_keys: Array, index: Array) -> tuple[Array, Array]:
        allowed = allowed_pairs(plan, mask, index, jnp.zeros_like(index))
        return used_keys | allowed.any(0), allowed.any(1)

    none = varying_as(jnp.zeros(plan.tile.key, bool), mask)
    used_keys, used_queries = _scan(chunk, none, jnp.arange(plan.query_tiles))
    return used_queries.reshape(-1), used_keys


def _scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`, and no loop for one chunk."""
    if jax.tree.leaves(chunks)[0].shape[0] > 1:
        return jax.lax.scan(body, carry, chunks)
    carry, results = body(carry, jax.tree.map(lambda leaf: leaf[0], chunks))
    return carry, jax.tree.map(lambda leaf: leaf[None], results)
