"""Cuts the inputs of tiled attention into tiles of t queries and s keys, and schedules the tiles.

`prepare` does all work outside of the main loop over tiles, for one example. It replaces, pads,
projects and cuts tokens, at a cost of O(T + S); JAX differentiates this. Finding the tokens that no
allowed pair contains (`used_tokens`) takes a loop of its own over the partly masked tiles. The
results `(Plan, Arrays)` are all that the main loop needs. They contain no NaN that a mask hides.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import accumulator_dtype, cast_floats
from attention_jax.core.batches import all_over_batch
from attention_jax.core.meshes import varying_as
from attention_jax.positions import dropout
from attention_jax.positions.mask_algebra import TileStatus
from attention_jax.positions.masks import Mask, padding_mask
from attention_jax.tiles import bias_tiles
from attention_jax.tiles.bias_tiles import BiasTiles
from attention_jax.tiles.features import projected_tokens, stand_in_features
from attention_jax.tiles.options import BlockSizes, Inputs, Options
from attention_jax.tiles.rounds import Plan, TileSchedule, key_tile_loops
from attention_jax.tiles.tile_arrays import cut

Array = jax.Array


class Arrays(NamedTuple):
    """The arrays in tiles, in the compute dtype unless a comment says otherwise.

    Features and values keep the dtype of 16-bit tokens, in which they are multiplied.
    """

    queries: Any  # [query_tiles, t, Fq] features from `project_query`, or a pytree of such arrays
    keys: Any  # [key_tiles, s, Fk] features from `project_key`, or a pytree of such arrays
    values: Array  # [key_tiles, s, Dv]
    # of the score, with what `tile_params` adds (for `Additive` two bools, whose gradient is 0)
    params: Any
    biases: BiasTiles
    normalizer_params: Any
    damping: BiasTiles
    # What follows is not differentiated.
    mask: Any = None  # a `Mask`, or None
    schedule: TileSchedule | None = None  # None without a mask: all keys are visited in order
    dropout_mask: Mask | None = None  # True for the weights that dropout keeps
    stand_ins: tuple[Any, Any] | None = None  # features that replace those of masked pairs
    num_keys: Array | None = None  # [query_tiles, t] if the normaliser reads it

    @property
    def compute_dtype(self) -> jnp.dtype:
        """float64 or float32: the dtype of logits, weights, sums and gradients."""
        return accumulator_dtype(self.values)


DIFFERENTIABLE = Arrays._fields[: Arrays._fields.index("mask")]


def prepare(options: Options, inputs: Inputs) -> tuple[Plan, Arrays]:
    """Replaces tokens that no allowed pair contains, pads to whole tiles, projects and cuts."""
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    plan = make_plan(options, *lengths)
    mask = mask_with_padding(plan, inputs.mask)
    schedule, used = None, None
    if mask is not None:
        schedule = schedule_of(tile_statuses(plan, mask))
        used = used_tokens(plan, mask, schedule)
    return plan, in_tiles(plan, inputs, mask, schedule, used or (None, None), lengths[1])


def mask_with_padding(plan: Plan, mask: Mask | None) -> Mask | None:
    """The mask, which also hides the padding of T and S to whole tiles; None: all are allowed."""
    if plan.padded_lengths == plan.lengths:
        return mask
    unpadded = padding_mask(*map(jnp.asarray, plan.lengths[::-1]))
    return unpadded if mask is None else mask & unpadded


def make_plan(options: Options, query_length: int, key_length: int) -> Plan:
    """Cuts T and S into tiles of equal size, no larger than `options.block_sizes`."""
    if is_symbolic_dim(query_length) or is_symbolic_dim(key_length):
        raise NotImplementedError(
            "implementation 'tiled' needs lengths that are known at tracing time; got T ="
            f" {query_length}, S = {key_length}: use 'reference', or export it for each length"
        )
    blocks = options.block_sizes
    tile = BlockSizes(_even_size(query_length, blocks.query), _even_size(key_length, blocks.key))
    return Plan(options, tile, (query_length, key_length))


def in_tiles(
    plan: Plan,
    inputs: Inputs,
    mask: Mask | None,
    schedule: TileSchedule | None,
    used: tuple[Array | None, Array | None],
    source_length: int,
) -> Arrays:
    """Replaces unused tokens, pads to whole tiles, projects and cuts.

    Args:
        plan: the sizes and numbers of tiles.
        inputs: the arrays of one example.
        mask: that of the tiles, which hides padding too.
        schedule: of the tiles, for this mask.
        used: see `used_tokens`; None if every query has all keys, and None if all keys are used.
        source_length: the number of all keys, those of other devices included.
    """
    score, dtype = plan.options.score, inputs.compute_dtype
    keys_per_query, used_keys = used
    used_queries = None if keys_per_query is None else keys_per_query > 0
    q_features, k_features, values, params = projected_tokens(
        score,
        inputs,
        plan.padded_lengths,
        (used_queries, used_keys),
        plan.ring.axis if plan.ring else None,
    )
    dropout_mask, num_keys = None, None
    if plan.options.dropout_rate > 0:
        dropout_mask = dropout.DropoutMask(plan.options.dropout_rate, inputs.dropout_rng)
    if plan.options.normalizer.uses_num_keys:
        counts = jnp.asarray(source_length) if keys_per_query is None else keys_per_query
        num_keys = cut(jnp.broadcast_to(counts, plan.padded_lengths[:1]), plan.query_tiles)
        num_keys = num_keys.astype(dtype)
    return Arrays(
        queries=jax.tree.map(functools.partial(cut, count=plan.query_tiles), q_features),
        keys=jax.tree.map(functools.partial(cut, count=plan.key_tiles), k_features),
        values=cut(values, plan.key_tiles),
        params=score.tile_params(params, q_features),
        biases=bias_tiles.prepare(inputs.bias, dtype, plan),
        normalizer_params=cast_floats(inputs.normalizer_params, dtype),
        damping=bias_tiles.prepare(inputs.damping, dtype, plan),
        mask=mask,
        schedule=schedule,
        dropout_mask=dropout_mask,
        stand_ins=None if mask is None else stand_in_features(score, inputs),
        num_keys=num_keys,
    )


# --- the steps of `prepare` ---


def _even_size(length: int, block: int) -> int:
    """The smallest equal size of tiles that needs no more of them than the size `block`."""
    count = max(math.ceil(length / block), 1)
    size = math.ceil(length / count)
    # A multiple of 8 fills the vector registers; the padding is masked.
    return max(size, 1) if count == 1 else min(8 * math.ceil(size / 8), block)


def tile_statuses(plan: Plan, mask: Mask) -> TileStatus:
    """Whether the mask leaves each tile empty, and whether full: bool [query_tiles, key_tiles]."""

    def status(query_tile, key_tile):
        return mask.tile_status(*plan.positions(query_tile, key_tile))

    def row(query_tile):
        """One row at a time: a user's status may evaluate the mask, bool [key_tiles, t, s]."""
        return jax.vmap(status, (None, 0))(query_tile, jnp.arange(plan.key_tiles))

    return jax.lax.map(row, jnp.arange(plan.query_tiles))


def schedule_of(statuses: TileStatus) -> TileSchedule:
    """The order of visits for these statuses, the same for all examples of the batch."""
    # One stacked array: a batch that is sharded over devices then needs one small reduction.
    empty, full = all_over_batch(jnp.stack(statuses))
    full &= ~empty
    rank = jnp.where(full, 0, jnp.where(empty, 2, 1))
    order = jnp.argsort(rank, axis=-1, stable=True)
    return TileSchedule(order, jnp.sum(full, axis=-1), jnp.sum(~empty, axis=-1))


def used_tokens(plan: Plan, mask: Mask, schedule: TileSchedule) -> tuple[Array, Array]:
    """How many keys each query may attend to, and which keys an allowed pair contains.

    It evaluates the mask on every tile that is partly masked, [t, s] at a time.

    Returns:
        (int [query_tiles * t], bool [key_tiles * s]).
    """

    def visit_query_tile(used_keys: Array, i: Array) -> tuple[Array, Array]:
        order, loops = key_tile_loops(plan, schedule, i)

        def visit_key_tile(masked: bool, n: Array, carry: tuple[Array, Array]) -> Any:
            counts, used_keys = carry
            j = order[n]
            if not masked:
                return counts + plan.tile.key, used_keys.at[j].set(True)
            allowed = plan.allowed(mask, i, j)
            return counts + allowed.sum(1), used_keys.at[j].set(used_keys[j] | allowed.any(0))

        carry = varying_as((jnp.zeros(plan.tile.query, int), used_keys), mask)
        for masked, first, end in loops:
            visit = functools.partial(visit_key_tile, masked)
            carry = jax.lax.fori_loop(first, end, visit, carry)
        counts, used_keys = carry
        return used_keys, counts

    used_keys = varying_as(jnp.zeros((plan.key_tiles, plan.tile.key), bool), mask)
    used_keys, counts = jax.lax.scan(visit_query_tile, used_keys, jnp.arange(plan.query_tiles))
    return counts.reshape(-1), used_keys.reshape(-1)
