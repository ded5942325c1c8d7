"""Tiles on many devices, each of which holds a part of the sequences: keys travel round a ring.

Every device keeps its queries, and the keys and values of all devices come by, one device's share
in each step; an online softmax takes them in. The backward pass sends them round again, together
with their gradients, which are at home again after the last step. Memory is that of `tiled` for
T / n queries and S / n keys, on each of n devices. What is done with the tiles is `tiled`'s, whose
rows know their largest logit and their normaliser over all keys, wherever those are.

Tokens are in the order of `zigzag`, and projected before the ring: only features travel. Which
tokens are used at all is a function of positions, which every device finds for its own.

Forward mode, and the derivatives of the backward pass, are those of the same ring under plain
differentiation.

Source: Liu, Zaharia and Abbeel 2023, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.implementations import online_softmax, plain_tiles, tiled, tiling
from attention_jax.implementations.chunks import ChunkedBias, ChunkedMask, Chunks
from attention_jax.implementations.contract import Inputs, Options
from attention_jax.implementations.online_softmax import Running
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.implementations.tiled import Residuals
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.implementations.zigzag import chunk_starts, from_zigzag, to_zigzag
from attention_jax.pairwise.masks import Mask

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is known before anything is traced."""

    plan: Plan  # of what one device holds
    axis: str  # of the mesh, over which the sequences are cut


class RingConstants(NamedTuple):
    """What no gradient reaches; functions of position are those of the whole sequences."""

    mask: Mask | None
    kept: Mask | None  # the weights that dropout keeps; None for all
    bias_integers: tuple[Any, ...]  # of the `ChunkedBias`, if there is a bias
    stand_ins: tuple[Any, Any] | None  # features in place of those of masked pairs
    queries: Chunks  # what this device holds
    keys: Chunks


def attend(options: Options, axis: str, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example, as one device sees it (under `jax.shard_map`).

    Args:
        options: as for every implementation.
        axis: the mesh axis over which sequences are cut.
        inputs: query, key and value are this device's part, in natural order and of even length;
            mask and bias are functions of positions in the whole sequences.

    Returns:
        its part of the output in the query's dtype, and of the statistics in the compute dtype.
    """
    ring, arrays, constants = _prepare(options, axis, inputs)
    output, statistics = _attend(ring, arrays, constants)
    results = output.astype(inputs.query.dtype), statistics
    return jax.tree.map(
        lambda tiles: from_zigzag(constants.queries.without_padding(tiles), axis), results
    )


def _prepare(options: Options, axis: str, inputs: Inputs) -> tuple[Ring, Arrays, RingConstants]:
    """What `tiling.prepare` does, for the tokens that this device has in the ring."""
    devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    halves = inputs.query.shape[0] // 2, inputs.key.shape[0] // 2
    plan = tiling.plan_of(options, *halves)
    queries, keys = (
        Chunks(chunk_starts(device, devices, length), length, tile)
        for length, tile in zip(halves, (plan.tile.query, plan.tile.key), strict=True)
    )
    plan = dataclasses.replace(plan, query_tiles=queries.tiles, key_tiles=keys.tiles)
    used = _used_tokens(plan, inputs.mask, queries, keys, devices)
    stand_ins = tiling.stand_ins_of(inputs, options)
    bias = None if inputs.bias is None else ChunkedBias(inputs.bias, queries, keys)
    inputs = inputs._replace(
        query=queries.pad(to_zigzag(inputs.query, axis)),
        key=jax.tree.map(lambda leaf: keys.pad(to_zigzag(leaf, axis)), inputs.key),
        value=keys.pad(to_zigzag(inputs.value, axis)),
        bias=bias,
    )
    arrays, integers = tiling.in_tiles(plan, inputs, *used)
    kept = tiling.kept_of(options, inputs)
    constants = RingConstants(inputs.mask, kept, integers, stand_ins, queries, keys)
    return Ring(plan, axis), arrays, constants


def _used_tokens(
    plan: Plan, mask: Mask | None, queries: Chunks, keys: Chunks, devices: int
) -> tuple[Array, Array]:
    """Bool, which of a device's queries and keys are in an allowed pair, with any other token."""
    if mask is None:
        indices = jnp.arange(queries.tiles * queries.tile), jnp.arange(keys.tiles * keys.tile)
        return queries.real(indices[0]), keys.real(indices[1])
    start = jnp.zeros(1, int)
    every_query, every_key = (
        Chunks(start, 2 * devices * own.length, own.tile) for own in (queries, keys)
    )

    def used(queries: Chunks, keys: Chunks) -> tuple[Array, Array]:
        pairs = dataclasses.replace(plan, query_tiles=queries.tiles, key_tiles=keys.tiles)
        allowed = ChunkedMask(mask, queries, keys)
        return tiling.used_tokens(pairs, allowed, tiling.visits_of(pairs, allowed))

    return used(queries, every_key)[0], used(every_query, keys)[1]


def _plain(
    ring: Ring, arrays: Arrays, constants: RingConstants
) -> tuple[Array, AttentionStatistics | None]:
    """The ring under plain differentiation: the twin that all other derivatives come from."""

    # Twice, since each reverse pass takes one away, as in `plain_tiles`.
    @jax.checkpoint
    @jax.checkpoint
    def step(running, arrays, here):
        @jax.checkpoint
        @jax.checkpoint
        def of_query_tile(tile):
            (i, queries, tables), running = tile
            return plain_tiles.absorb_keys(ring.plan, arrays, here, i, queries, tables, running)

        tiles = plain_tiles.query_tiles(ring.plan, arrays), running
        return jax.lax.map(of_query_tile, tiles)

    return jax.vmap(online_softmax.finish)(_round_the_ring(ring, arrays, constants, step))


@functools.partial(custom_vjp, nondiff_argnums=(0,), twin=_plain)
def _attend(
    ring: Ring, arrays: Arrays, constants: RingConstants
) -> tuple[Array, AttentionStatistics | None]:
    output, statistics, _ = _forward(ring, arrays, constants)
    return output, statistics


def _attend_fwd(ring, arrays, constants):
    output, statistics, (largest, normalizer) = _forward(ring, arrays, constants)
    entropy = None if statistics is None else statistics.entropy
    residuals = Residuals(arrays, constants, output, largest, normalizer, entropy)
    return (output, statistics), residuals


def _attend_bwd(ring, residuals, cotangents):
    return _backward(ring, residuals, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(ring: Ring, arrays: Arrays, constants: RingConstants):
    """Output, statistics if they are asked for, and (largest, normalizer), all in tiles."""

    def step(running, arrays, here):
        def of_query_tile(tile):
            i, queries, running = tile
            return tiled.absorb_keys(ring.plan, arrays, here, i, queries, running)

        tiles = jnp.arange(ring.plan.query_tiles), arrays.queries, running
        return jax.lax.map(of_query_tile, tiles)

    running = _round_the_ring(ring, arrays, constants, step)
    return *jax.vmap(online_softmax.finish)(running), (running.largest, running.normalizer)


# As in `tiled`, where the formulas stand. The gradients of keys and values travel with them.
def _backward(ring: Ring, residuals: Residuals, cotangents: Any) -> Arrays:
    """The cotangents of `arrays`."""
    arrays, constants, *_ = residuals
    rows = tiled.rows_of(residuals, cotangents)

    def step(carry, n):
        visiting, others, dqueries = carry
        here = _in_step(ring, constants, n)
        others, addend = tiled.add_gradients(
            ring.plan, _with_visitors(arrays, visiting), here, rows, others
        )
        dqueries = jax.tree.map(jnp.add, dqueries, addend)
        visiting, (dkeys, dvalues) = _pass_on(ring, (visiting, (others.keys, others.values)))
        return (visiting, others._replace(keys=dkeys, values=dvalues), dqueries), None

    zeros = jax.tree.map(jnp.zeros_like, arrays)
    carry = ((arrays.keys, arrays.values), zeros._replace(queries=None), zeros.queries)
    (_, others, dqueries), _ = jax.lax.scan(step, carry, _steps(ring))
    return others._replace(queries=dqueries)


# --- the ring ---


def _round_the_ring(ring: Ring, arrays: Arrays, constants: RingConstants, step: Any) -> Running:
    """`running = step(running, arrays with the keys that have come, Constants)`, n times."""

    def whole_step(carry, n):
        visiting, running = carry
        here = _in_step(ring, constants, n)
        running = step(running, _with_visitors(arrays, visiting), here)
        # Asked for by nothing above, so that they may travel meanwhile. The last step brings all
        # home: one of n too many, for a program with a single copy of the tile.
        return (_pass_on(ring, visiting), running), None

    start = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (ring.plan.query_tiles, *leaf.shape)),
        tiling.start(ring.plan, arrays),
    )
    carry = ((arrays.keys, arrays.values), start)
    (_, running), _ = jax.lax.scan(whole_step, carry, _steps(ring))
    return running


def _steps(ring: Ring) -> Array:
    return jnp.arange(jax.lax.axis_size(ring.axis))


def _in_step(ring: Ring, constants: RingConstants, n: Array) -> Constants:
    """What a tile needs to know, n steps after the keys have left home."""
    devices = jax.lax.axis_size(ring.axis)
    home = (jax.lax.axis_index(ring.axis).astype(n.dtype) - n) % devices
    queries, keys = constants.queries, constants.keys
    keys = dataclasses.replace(keys, starts=chunk_starts(home, devices, keys.length))
    mask, visits, kept = None, None, None
    if constants.mask is not None or any(own.padded != own.length for own in (queries, keys)):
        mask = ChunkedMask(constants.mask, queries, keys)
        visits = tiling.visits_of(ring.plan, mask)
    if constants.kept is not None:
        kept = ChunkedMask(constants.kept, queries, keys)
    integers = tuple(dataclasses.replace(part, keys=keys) for part in constants.bias_integers)
    return Constants(mask, visits, kept, integers, constants.stand_ins)


def _with_visitors(arrays: Arrays, visiting: tuple[Any, Array]) -> Arrays:
    keys, values = visiting
    return arrays._replace(keys=keys, values=values)


def _pass_on(ring: Ring, tree: Any) -> Any:
    """To the next device."""
    devices = jax.lax.axis_size(ring.axis)
    return jax.lax.ppermute(tree, ring.axis, [(p, (p + 1) % devices) for p in range(devices)])
