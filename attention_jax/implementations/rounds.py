"""Loops over the keys of attention: in one round on one device, or one round per device of a ring.

The work on a tile does not depend on where its keys come from. `tiled` and its twin pass their work
to `fold_rounds` and `map_query_tiles`. On one device the first is a single call with all keys, and
the second a map over tiles of queries. All else is for a ring, which calls the work once per round,
for the keys that the device holds then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.implementations.contract import BlockSizes, Options
from attention_jax.normalizers.rows import FinalRows, RowSums
from attention_jax.pairwise.position_functions import Shifts

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


def map_query_tiles(
    plan: Plan, arrays: Any, tiles: Any, attend: Callable[[Any, Any, Any], Any], recompute: bool
) -> FinalRows:
    """The results of each tile of queries, with `sums = attend(arrays, tile, sums)` in every round.

    Args:
        plan: the sizes and numbers of tiles, and the ring.
        arrays: as in `fold_rounds`.
        tiles: a pytree of arrays [query_tiles, ...]: the queries and the arrays that go with them.
        attend: adds the keys of a round to the `RowSums` of a tile of queries.
        recompute: whether the gradient recomputes each step instead of saving its arrays.

    Returns:
        the results, each with a leading axis [query_tiles].
    """
    normalizer, values = plan.options.normalizer, arrays.values
    zeros = jnp.zeros((plan.tile.query, values.shape[-1]), arrays.compute_dtype)
    empty = RowSums.empty(normalizer, zeros, entropy=plan.options.return_statistics)
    empty = varying_as(empty, arrays)

    # Each reverse pass removes one checkpoint. With a single checkpoint, reverse mode of reverse
    # mode would save all keys for every tile of queries. The second checkpoint costs no time.
    def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(jax.checkpoint(function)) if recompute else function

    if plan.ring is None:

        @checkpointed
        def whole_tile(tile: Any) -> FinalRows:
            return attend(arrays, tile, empty).finalize(normalizer)

        return jax.lax.map(whole_tile, tiles)

    @checkpointed
    def one_round(arrays: Any, sums: Any) -> Any:
        @checkpointed
        def one_tile(tile_and_sums: Any) -> Any:
            return attend(arrays, *tile_and_sums)

        return jax.lax.map(one_tile, (tiles, sums))

    def visit(arrays: Any, dkeys: None, sums: Any) -> tuple[None, Any]:
        return dkeys, one_round(arrays, sums)

    count = plan.query_tiles
    sums = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), empty)
    _, sums = fold_rounds(plan.ring, arrays, None, sums, visit)
    return jax.vmap(lambda sums: sums.finalize(normalizer))(sums)
