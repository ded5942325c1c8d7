"""Attention whose weights depend on earlier queries, computed in chunks of t queries.

A carry passes from each query to the next: a coverage, or the keys where walks have stopped. For
the gradient, the loop over chunks saves only the carry at the start of each chunk and recomputes
the rest. If a query saves c S numbers, t queries per chunk take memory S (T / t + c t) instead of
c S T, and t grows as the square root of T.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.core.products import weighted_sum
from attention_jax.scores import Score
from attention_jax.tiles.features import pair_logits
from attention_jax.tiles.options import BlockSizes, Inputs, Options
from attention_jax.tiles.prepare import Arrays, BiasTiles, Plan, prepare, repeated, uncut
from attention_jax.tiles.tile import Tile

Array = jax.Array

SMALLEST_CHUNK = 64  # up to this T there is one chunk, and nothing is recomputed


class Chunk(NamedTuple):
    """t queries and all S keys, in the compute dtype, without the NaN of hidden tokens."""

    plan: Plan
    arrays: Arrays  # of all chunks
    queries: Any  # [t, Fq] features from `project_query`, or a pytree of such arrays
    keys: Any  # [S, Fk] features from `project_key`, or a pytree of such arrays
    bias: Array | None  # [t, S]
    allowed: Array | None  # bool [t, S], False for padding of the last chunk; None for all pairs
    positions: Array  # int [t], the positions of the queries

    def logits(self) -> Array:
        """The logits [t, S] with the bias, in the compute dtype; masked entries hold anything."""
        score, arrays, features = self.plan.options.score, self.arrays, (self.queries, self.keys)
        hidden = self.allowed, arrays.stand_ins
        logits = pair_logits(score, arrays.shared.params, *features, *hidden)
        logits = logits.astype(self.plan.dtype)
        return logits if self.bias is None else logits + self.bias


def attend_in_order(
    score: Score,
    inputs: Inputs,
    compute_weights: Callable[[Chunk, Any], tuple[Any, Array, Any]],
    carry: Any,
    *,
    return_weights: bool,
) -> tuple[Array, Array | None, Any, Any]:
    """Attention whose weights depend on earlier queries; chunks are computed in order.

    Args:
        score: the score; its projections run once.
        inputs: the arrays of one example.
        compute_weights: takes a chunk and the carry, and returns the next carry, the weights [t, S]
            (0 where masked), and further results per query, [t, ...].
        carry: the carry before the first query.
        return_weights: whether to return the weights of all queries.

    Returns:
        the output [T, Dv] in the query's dtype, 0 for a query without keys; the weights [T, S] in
        that dtype, None unless requested; the further results [T, ...], 0 for a query without
        keys, None if T S = 0; and the carry after the last query.
    """
    dtype, lengths = inputs.query.dtype, (inputs.query.shape[0], inputs.key.shape[0])
    if any(map(is_symbolic_dim, lengths)):
        raise NotImplementedError(
            "attention in order (coverage, monotonic) needs lengths that are known when it is"
            f" traced; got T = {lengths[0]}, S = {lengths[1]}: export it for each length"
        )
    if 0 in lengths:
        weights = jnp.zeros(lengths, dtype) if return_weights else None
        return jnp.zeros((lengths[0], inputs.value.shape[-1]), dtype), weights, None, carry
    # JAX differentiates the loop: gradients of 16-bit arrays would be summed in 16 bits.
    inputs = cast_floats(inputs, inputs.compute_dtype)
    size = max(SMALLEST_CHUNK, math.isqrt(lengths[0]))
    options = Options(score, BlockSizes(size, lengths[1]))
    plan, arrays = prepare(options, inputs)
    keys, values = jax.tree.map(lambda tiles: tiles[0], (arrays.keys, arrays.values))
    # The loop takes tables row by row. If it read a whole table, every step would add a gradient of
    # the size of the table.
    biases = arrays.shared.biases
    tables = [repeated(table, plan.query_tiles) for table in biases.tables]
    first_key = jnp.asarray(0)

    def attend(carry: Any, query_tile: Any) -> tuple[Any, Any]:
        index, queries, tables = query_tile
        tile = Tile(plan, arrays, index, first_key, arrays.mask is not None)
        bias = tile.bias_of(BiasTiles(tuple(table[None] for table in tables), biases.functions))
        chunk = Chunk(
            plan=plan,
            arrays=arrays,
            queries=queries,
            keys=keys,
            bias=None if bias is None else jnp.broadcast_to(bias, plan.tile),
            allowed=tile.allowed,
            positions=tile.positions[0],
        )
        carry, weights, rows = compute_weights(chunk, carry)
        output = weighted_sum(weights, values)
        if chunk.allowed is not None:
            # A NaN value that another query may see reaches a query without keys as 0 * NaN.
            any_allowed = chunk.allowed.any(1)
            output = allowed_only(any_allowed[:, None], output)
            rows = jax.tree.map(functools.partial(allowed_only, any_allowed), rows)
        returned_weights = weights.astype(dtype) if return_weights else None
        return carry, (output.astype(dtype), returned_weights, rows)

    if plan.query_tiles > 1:
        attend = jax.checkpoint(attend, prevent_cse=False)
    query_tiles = (jnp.arange(plan.query_tiles), arrays.queries, tables)
    carry, results = jax.lax.scan(attend, carry, query_tiles, unroll=plan.query_tiles == 1)
    results = jax.tree.map(functools.partial(uncut, length=lengths[0]), results)
    return *results, carry


def allowed_only(allowed: Array | None, pairs: Array) -> Array:
    """`pairs` with 0 in place of masked entries, whose cotangents then reach nothing."""
    return pairs if allowed is None else jnp.where(allowed, pairs, 0)
