"""Ring attention: tiled attention over sequences that are sharded over n devices.

Every device keeps its queries. The keys and values go round the ring of devices, one device's share
per round. The work on a tile and its gradients are those of `tiled`, since each row saves its
largest logit and its normaliser over the keys of all devices. In the backward pass keys and values
travel together with their gradients. Each device needs the memory of `tiled` for T / n queries and
S / n keys.

Tokens are put in `zigzag` order and projected before the first round, so that features travel. The
mask is a function of positions, so each device computes which of its tokens are used.

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
from attention_jax.implementations.contract import BlockSizes, Inputs, Options, results
from attention_jax.implementations.features import stand_in_features
from attention_jax.implementations.rounds import Visit
from attention_jax.implementations.tiling import Arrays, Constants, Plan, TileSchedule
from attention_jax.implementations.zigzag import chunk_starts, from_zigzag, to_zigzag
from attention_jax.normalizers import AttentionStatistics
from attention_jax.pairwise.mask_algebra import Mask, TileStatus

Array = jax.Array


def attend(options: Options, axis: str, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """Attention for one device's part of one example, under `jax.shard_map`.

    Args:
        options: as for every implementation.
        axis: the mesh axis over which sequences are sharded.
        inputs: query, key and value are the device's part, in natural order and of even length;
            mask and bias are functions of positions in the whole sequences.

    Returns:
        the device's part of the output in the query's dtype, and of the statistics in the compute
        dtype.
    """
    plan, arrays, constants = _prepare(options, axis, inputs)
    rows = jax.tree.map(
        constants.queries.remove_padding, tiled.attend_tiles(plan, arrays, constants)
    )
    return jax.tree.map(lambda row: from_zigzag(row, axis), results(options, inputs, *rows))


class RingConstants(NamedTuple):
    """The arrays that are not differentiated; the masks are those of the whole sequences."""

    mask: Mask | None
    dropout_mask: Mask | None  # True for the weights that dropout keeps; None without dropout
    bias_integers: tuple[Any, ...]  # the integers of the `ChunkedBias`, if there is a bias
    stand_ins: tuple[Any, Any] | None  # features that replace those of masked pairs
    queries: Chunks  # the queries of this device
    keys: Chunks  # the keys of this device before the first round
    schedules: TileSchedule | None  # of each round, [devices, ...]; None if no pair is masked
    num_keys: Array | None  # [query_tiles, t] among the keys of all devices, if it is read


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one mesh axis; each sends its keys to the next after every round.

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

        def one_round(state: Any, step_and_schedule: Any) -> tuple[Any, None]:
            keys, carry = visit(self._constants(constants, *step_and_schedule), *state)
            # The last permutation returns the keys to their first device. Only gradients need it;
            # the forward pass has it too, so that the program holds a single copy of the round.
            return (jax.lax.ppermute(keys, self.axis, next_device), carry), None

        rounds = jnp.arange(devices), constants.schedules
        (keys, carry), _ = jax.lax.scan(one_round, (keys, carry), rounds)
        return keys, carry

    def keys_of_round(self, keys: Chunks, step: Array) -> Chunks:
        """The keys that are here in round `step`, in which they have been sent on `step` times."""
        devices = jax.lax.axis_size(self.axis)
        owner = (jax.lax.axis_index(self.axis).astype(step.dtype) - step) % devices
        return dataclasses.replace(keys, starts=chunk_starts(owner, devices, keys.length))

    def _constants(
        self, constants: RingConstants, step: Array, schedule: TileSchedule | None
    ) -> Constants:
        """The constants of round `step`."""
        queries, keys = constants.queries, self.keys_of_round(constants.keys, step)
        mask, dropout_mask = None, None
        if schedule is not None:
            mask = ChunkedMask(constants.mask, queries, keys)
        if constants.dropout_mask is not None:
            dropout_mask = ChunkedMask(constants.dropout_mask, queries, keys)
        integers = tuple(dataclasses.replace(part, keys=keys) for part in constants.bias_integers)
        return Constants(
            mask, schedule, dropout_mask, integers, constants.stand_ins, constants.num_keys
        )


def _prepare(options: Options, axis: str, inputs: Inputs) -> tuple[Plan, Arrays, RingConstants]:
    """`tiling.prepare` for the tokens of this device."""
    devices, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    halves = inputs.query.shape[0] // 2, inputs.key.shape[0] // 2
    plan = tiling.make_plan(options, *halves)
    queries, keys = (
        Chunks(chunk_starts(device, devices, length), length, tile)
        for length, tile in zip(halves, (plan.tile.query, plan.tile.key), strict=True)
    )
    plan = dataclasses.replace(
        plan, query_tiles=queries.num_tiles, key_tiles=keys.num_tiles, ring=Ring(axis)
    )
    used = _used_tokens(plan, inputs.mask, queries, keys, devices)
    source_length = 2 * devices * keys.length
    num_keys = tiling.num_keys_of_tiles(
        options, plan.grid, used[0], source_length, inputs.compute_dtype
    )
    stand_ins = stand_in_features(options.score, inputs)
    bias = None if inputs.bias is None else ChunkedBias(inputs.bias, queries, keys)
    inputs = inputs._replace(
        query=queries.add_padding(to_zigzag(inputs.query, axis)),
        key=jax.tree.map(lambda leaf: keys.add_padding(to_zigzag(leaf, axis)), inputs.key),
        value=keys.add_padding(to_zigzag(inputs.value, axis)),
        bias=bias,
    )
    arrays, integers = tiling.tile_inputs(plan, inputs, *used)
    constants = RingConstants(
        mask=inputs.mask,
        dropout_mask=tiling.make_dropout_mask(options, inputs),
        bias_integers=integers,
        stand_ins=stand_ins,
        queries=queries,
        keys=keys,
        schedules=_schedules(Ring(axis), inputs.mask, queries, keys),
        num_keys=num_keys,
    )
    return plan, arrays, constants


def _schedules(ring: Ring, mask: Mask | None, queries: Chunks, keys: Chunks) -> TileSchedule | None:
    """The schedule of each round, [devices, ...]; None if no pair is masked in any.

    All are made before the first round, and the batch decides about all tiles together: a batch
    that is sharded over another mesh axis then needs one small reduction, and none in a round.
    """
    padded = any(chunks.padded_length != chunks.length for chunks in (queries, keys))
    if mask is None and not padded:
        return None
    grid = Grid(BlockSizes(queries.tile, keys.tile), (queries.num_tiles, keys.num_tiles))

    def status(step: Array) -> TileStatus:
        return tiling.tile_statuses(
            grid, ChunkedMask(mask, queries, ring.keys_of_round(keys, step))
        )

    return tiling.schedule_of(jax.lax.map(status, jnp.arange(jax.lax.axis_size(ring.axis))))


def _used_tokens(
    plan: Plan, mask: Mask | None, queries: Chunks, keys: Chunks, devices: int
) -> tuple[Array, Array]:
    """How many keys each query of a device may attend to, and which of its keys are used; bool."""
    if mask is None:
        query_length, key_length = plan.padded_lengths
        is_query = queries.is_token(jnp.arange(query_length))
        num_keys = jnp.where(is_query, 2 * devices * keys.length, 0)
        return num_keys, keys.is_token(jnp.arange(key_length))
    start = jnp.zeros(1, int)
    all_queries, all_keys = (
        Chunks(start, 2 * devices * chunks.length, chunks.tile) for chunks in (queries, keys)
    )

    def used(queries: Chunks, keys: Chunks) -> tuple[Array, Array]:
        chunk_plan = dataclasses.replace(
            plan, query_tiles=queries.num_tiles, key_tiles=keys.num_tiles
        )
        chunk_mask = ChunkedMask(mask, queries, keys)
        schedule = tiling.make_schedule(chunk_plan.grid, chunk_mask)
        return tiling.used_tokens(chunk_plan, chunk_mask, schedule)

    return used(queries, all_keys)[0], used(all_queries, keys)[1]
