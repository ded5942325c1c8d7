"""Tiles on many devices, each of which holds a part of the sequences: keys travel round a ring.

Every device keeps its queries, and the keys and values of all devices come by, one device's share
per round. The work on a tile is `tiled`'s, and so are its gradients: rows know their largest logit
and their normaliser over all keys, wherever those are. In the backward pass keys and values travel
together with their gradients. Memory is that of `tiled` for T / n queries and S / n keys, on each
of n devices.

Tokens are in the order of `zigzag` and projected before the first round, so that features travel.
Which tokens are used at all is a function of positions, which every device computes for its own.

Source: Liu, Zaharia and Abbeel 2023, section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.implementations import tiled, tiling
from attention_jax.implementations.bias_tiles import Grid
from attention_jax.implementations.chunks import ChunkedBias, ChunkedMask, Chunks
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.implementations.rounds import Visit
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.implementations.zigzag import chunk_starts, from_zigzag, to_zigzag
from attention_jax.pairwise.masks import Mask

Array = jax.Array


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
    plan, arrays, constants = _prepare(options, axis, inputs)
    output, statistics = tiled.attend_tiles(plan, arrays, constants)
    results = output.astype(inputs.query.dtype), statistics
    return jax.tree.map(
        lambda tiles: from_zigzag(constants.queries.without_padding(tiles), axis), results
    )


class RingConstants(NamedTuple):
    """What no gradient reaches; functions of position are those of the whole sequences."""

    mask: Mask | None
    kept: Mask | None  # the weights that dropout keeps; None for all
    bias_integers: tuple[Any, ...]  # of the `ChunkedBias`, if there is a bias
    stand_ins: tuple[Any, Any] | None  # features in place of those of masked pairs
    queries: Chunks  # what this device holds
    keys: Chunks


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one mesh axis; each passes its keys on to the next after every round.

    Attributes:
        axis: the name of the mesh axis.
    """

    axis: str

    def fold(
        self, constants: RingConstants, keys: Any, carry: Any, visit: Visit
    ) -> tuple[Any, Any]:
        """`keys, carry = visit(Constants, keys, carry)`, once per device; see `fold_rounds`."""
        devices = jax.lax.axis_size(self.axis)
        next_device = [(device, (device + 1) % devices) for device in range(devices)]

        def one_round(state: Any, step: Array) -> tuple[Any, None]:
            keys, carry = visit(self._constants(constants, step), *state)
            # After the last round the keys are home. That permutation serves the gradients; the
            # forward pass has it too, so that the program holds a single copy of the round.
            return (jax.lax.ppermute(keys, self.axis, next_device), carry), None

        (keys, carry), _ = jax.lax.scan(one_round, (keys, carry), jnp.arange(devices))
        return keys, carry

    def _constants(self, constants: RingConstants, step: Array) -> Constants:
        """The constants of a round in which the keys have been passed on `step` times."""
        devices = jax.lax.axis_size(self.axis)
        home = (jax.lax.axis_index(self.axis).astype(step.dtype) - step) % devices
        queries, keys = constants.queries, constants.keys
        keys = dataclasses.replace(keys, starts=chunk_starts(home, devices, keys.length))
        mask, schedule, kept = None, None, None
        padded = any(chunks.padded != chunks.length for chunks in (queries, keys))
        if constants.mask is not None or padded:
            mask = ChunkedMask(constants.mask, queries, keys)
            grid = Grid(BlockSizes(queries.tile, keys.tile), (queries.tiles, keys.tiles))
            schedule = tiling.schedule_of(grid, mask)
        if constants.kept is not None:
            kept = ChunkedMask(constants.kept, queries, keys)
        integers = tuple(dataclasses.replace(part, keys=keys) for part in constants.bias_integers)
        return Constants(mask, schedule, kept, integers, constants.stand_ins)


def _prepare(options: Options, axis: str, inputs: Inputs) -> tuple[Plan, Arrays, RingConstants]:
    """What `tiling.prepare` does, for the tokens that this device has in the ring."""
    devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    halves = inputs.query.shape[0] // 2, inputs.key.shape[0] // 2
    plan = tiling.plan_of(options, *halves)
    queries, keys = (
        Chunks(chunk_starts(device, devices, length), length, tile)
        for length, tile in zip(halves, (plan.tile.query, plan.tile.key), strict=True)
    )
    plan = dataclasses.replace(
        plan, query_tiles=queries.tiles, key_tiles=keys.tiles, ring=Ring(axis)
    )
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
    return plan, arrays, constants


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
        return tiling.used_tokens(pairs, allowed, tiling.schedule_of(pairs.grid, allowed))

    return used(queries, every_key)[0], used(every_query, keys)[1]
