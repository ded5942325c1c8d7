"""Loops over the keys of attention: over tiles, and over the rounds of a ring of devices.

The work on a tile does not depend on where its keys come from. On one device all keys are there,
and `fold_rounds` is a single call. A ring calls the work once per round, for the keys that the
device holds then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.normalizers.rows import FinalRows, RowSums
from attention_jax.positions.masks import Mask
from attention_jax.positions.position_functions import Shifts
from attention_jax.tiles import tile_arrays
from attention_jax.tiles.options import BlockSizes, Options

Array = jax.Array
Visit = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one mesh axis; each sends its keys to the next after every round.

    Attributes:
        axis: the name of the mesh axis.
        lengths: the number of queries and of keys of a device.
        halves: how many of these the device does not exchange, in whole tiles.
    """

    axis: str
    lengths: tuple[int, int]
    halves: tuple[int, int]

    def mirrored(self, tokens: Array, side: int) -> Array:
        """Exchanges the second half of tokens [length, ...] with the mirror image; an involution.

        Args:
            tokens: those of one device.
            side: 0 for queries, 1 for keys.
        """
        devices, half = jax.lax.axis_size(self.axis), self.halves[side]
        mirror_images = [(device, devices - 1 - device) for device in range(devices)]
        second = jax.lax.ppermute(tokens[half:], self.axis, mirror_images)
        return jnp.concatenate([tokens[:half], second])

    def shifts(self, step: Array) -> Shifts:
        """The positions of the queries, and of the keys that are here in round `step`."""
        devices, device = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        owner = (device.astype(step.dtype) - step) % devices  # each round has sent the keys on
        queries, keys = (jnp.stack([first, devices - 1 - first]) for first in (device, owner))
        return Shifts(self.lengths[0] * queries, self.lengths[1] * keys, self.halves)

    def at_round(self, functions: Any, step: Array) -> Any:
        """A pytree of functions of positions, for the keys of round `step`."""

        def shifted(leaf: Any) -> Any:
            return self.shifts(step) if isinstance(leaf, Shifts) else leaf

        return jax.tree.map(shifted, functions, is_leaf=lambda leaf: isinstance(leaf, Shifts))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a tiled computation."""

    options: Options
    tile: BlockSizes  # t and s
    lengths: tuple[int, int]  # T and S
    ring: Ring | None = None  # the devices that share the keys; None for a single device

    @property
    def query_tiles(self) -> int:
        """The number of tiles of queries."""
        return math.ceil(self.lengths[0] / self.tile.query)

    @property
    def key_tiles(self) -> int:
        """The number of tiles of keys."""
        return math.ceil(self.lengths[1] / self.tile.key)

    @property
    def padded_lengths(self) -> tuple[int, int]:
        """T and S, padded to whole tiles."""
        return self.query_tiles * self.tile.query, self.key_tiles * self.tile.key

    def positions(self, i: Array, j: Array) -> tuple[Array, Array]:
        """The positions of the queries and of the keys of a tile, int [t] and [s]."""
        return tile_arrays.positions(i, self.tile.query), tile_arrays.positions(j, self.tile.key)

    def allowed(self, mask: Mask, i: Array, j: Array) -> Array:
        """The values of a mask on one tile, bool [t, s]."""
        allowed = mask.allowed(*self.positions(i, j))
        return jnp.broadcast_to(allowed, (self.tile.query, self.tile.key))


class TileSchedule(NamedTuple):
    """The order in which each tile of queries visits tiles of keys, shared by the whole batch."""

    order: Array  # int [query_tiles, key_tiles] key tiles: full, then partly masked, then empty
    full: Array  # int [query_tiles] the number of full key tiles
    visited: Array  # int [query_tiles] the number of key tiles that are not empty


def key_tile_loops(
    plan: Plan, schedule: TileSchedule | None, query_tile: Array
) -> tuple[Array, list[tuple[bool, Any, Any]]]:
    """The loops over the tiles of keys that a tile of queries attends to.

    Full and partly masked tiles have a loop each. A branch in a single loop would copy the carry.
    The visit of a single tile is no loop: XLA:CPU would run what remains in it on one thread.

    Returns:
        the order of the tiles, int [key_tiles]; and (whether the mask may hide pairs, the first and
        the end of the places in this order) of each loop.
    """
    if schedule is None:
        return jnp.arange(plan.key_tiles), [(False, 0, plan.key_tiles)]
    order, full, visited = (array[query_tile] for array in schedule)
    if plan.query_tiles == plan.key_tiles == 1 and plan.ring is None:
        return order, [(True, 0, 1)]
    return order, [(False, 0, full), (True, full, visited)]


def fold_rounds(
    ring: Ring | None, arrays: Any, dkeys: Any, carry: Any, visit: Visit
) -> tuple[Any, Any]:
    """`dkeys, carry = visit(arrays, dkeys, carry)`, once per round.

    Args:
        ring: None for one round with all keys.
        arrays: those of all tiles; in a ring with the positions of the first round, and with the
            schedules of all rounds. The ring gives each round its keys, positions and schedule.
        dkeys: a pytree that belongs to the keys, such as their gradients. A ring sends it with them
            to the next device after each round.
        carry: a pytree that stays on its device.
        visit: the work of one round.

    Returns:
        `dkeys`, back on their first device, and the last carry.
    """
    if ring is None:
        return visit(arrays, dkeys, carry)
    devices = jax.lax.axis_size(ring.axis)
    next_device = [(device, (device + 1) % devices) for device in range(devices)]

    def one_round(state: Any, step_and_schedule: Any) -> tuple[Any, None]:
        (keys, values, dkeys), carry = state
        step, schedule = step_and_schedule
        of_round = ring.at_round(arrays._replace(schedule=None), step)
        of_round = of_round._replace(schedule=schedule, keys=keys, values=values)
        dkeys, carry = visit(of_round, dkeys, carry)
        # The ring can send the keys while the round computes. The last permutation returns them to
        # their first device. Only gradients need it; the forward pass has it too, so that the
        # program holds a single copy of the round.
        return (jax.lax.ppermute((keys, values, dkeys), ring.axis, next_device), carry), None

    state: Any = (arrays.keys, arrays.values, dkeys), carry
    ((*_, dkeys), carry), _ = jax.lax.scan(one_round, state, (jnp.arange(devices), arrays.schedule))
    return dkeys, carry


def rows_of_ring(
    plan: Plan,
    arrays: Any,
    tiles: Any,
    add_keys: Callable[..., RowSums],
    empty: RowSums,
    checkpoint: Callable[[Any], Any] = lambda function: function,
) -> FinalRows:
    """The results of all tiles of queries, [query_tiles, t, ...], after the keys of all devices.

    Args:
        plan: the sizes and numbers of tiles, and the ring.
        arrays: as in `fold_rounds`.
        tiles: a tuple of arrays [query_tiles, ...]: the queries and what goes with them.
        add_keys: `add_keys(arrays, *tile, sums)` are the sums of one tile of queries after the keys
            of one round.
        empty: the sums of a tile of queries before its first key.
        checkpoint: wraps the work of a round, and that on a tile of queries.
    """

    @checkpoint
    def add_round(arrays: Any, sums: RowSums) -> RowSums:
        return jax.lax.map(checkpoint(lambda tile: add_keys(arrays, *tile)), (*tiles, sums))

    def visit(arrays: Any, dkeys: None, sums: RowSums) -> tuple[None, RowSums]:
        return dkeys, add_round(arrays, sums)

    count = plan.query_tiles
    sums = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), empty)
    _, sums = fold_rounds(plan.ring, arrays, None, sums, visit)
    return jax.vmap(lambda sums: sums.finalize(plan.options.normalizer))(sums)
