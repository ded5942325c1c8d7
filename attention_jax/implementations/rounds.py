"""Loops over the keys of attention: in one round on one device, or one round per device of a ring.

The work on a tile does not depend on where its keys come from. `tiled` and its twin pass their work
to `fold_rounds` and `map_query_tiles`. On one device the first is a single call with all keys, and
the second a map over tiles of queries. All else is for a ring, which calls the work once per round,
for the keys that the device holds then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.implementations.contract import BlockSizes, Options
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
    query_tiles: int
    key_tiles: int
    ring: Ring | None = None  # the devices that share the keys; None for a single device

    @property
    def padded_lengths(self) -> tuple[int, int]:
        """T and S, padded to whole tiles."""
        return self.query_tiles * self.tile.query, self.key_tiles * self.tile.key


def fold_rounds(
    ring: Ring | None, arrays: Any, keys: Any, carry: Any, visit: Visit
) -> tuple[Any, Any]:
    """`keys, carry = visit(arrays, keys, carry)`, once per round.

    Args:
        ring: None for one round with all keys.
        arrays: those of all tiles; a ring replaces the positions and the schedule in each round.
        keys: a pytree of all that belongs to keys (features, values, their gradients). A ring sends
            it to the next device after each round.
        carry: a pytree that stays on its device.
        visit: the work of one round.

    Returns:
        the keys, back on their first device, and the last carry.
    """
    if ring is None:
        return visit(arrays, keys, carry)
    devices = jax.lax.axis_size(ring.axis)
    next_device = [(device, (device + 1) % devices) for device in range(devices)]

    def one_round(state: Any, step_and_schedule: Any) -> tuple[Any, None]:
        step, schedule = step_and_schedule
        of_round = ring.at_round(arrays._replace(schedule=None), step)
        keys, carry = visit(of_round._replace(schedule=schedule), *state)
        # The last permutation returns the keys to their first device. Only gradients need it; the
        # forward pass has it too, so that the program holds a single copy of the round.
        return (jax.lax.ppermute(keys, ring.axis, next_device), carry), None

    rounds = jnp.arange(devices), arrays.schedule
    (keys, carry), _ = jax.lax.scan(one_round, (keys, carry), rounds)
    return keys, carry


def map_query_tiles(
    ring: Ring | None,
    arrays: Any,
    keys: Any,
    tiles: Any,
    *,
    start: Callable[[], Any],
    attend: Callable[[Any, Any, Any, Any], Any],
    finish: Callable[[Any], Any],
    recompute: bool = False,
) -> Any:
    """`finish(state)` for each tile of queries, with `state = attend(..., state)` in every round.

    Args:
        ring: as in `fold_rounds`.
        arrays: as in `fold_rounds`.
        keys: as in `fold_rounds`.
        tiles: a pytree of arrays [query_tiles, ...]: the queries and the arrays that go with them.
        start: returns the state of one tile of queries before its first key.
        attend: takes (arrays, keys, tile, state) and returns the next state.
        finish: takes the last state of a tile and returns its result.
        recompute: whether the gradient recomputes each step instead of saving its arrays.

    Returns:
        the results, each with a leading axis [query_tiles].
    """

    # Each reverse pass removes one checkpoint. With a single checkpoint, reverse mode of reverse
    # mode would save all keys for every tile of queries. The second checkpoint costs no time.
    def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(jax.checkpoint(function)) if recompute else function

    if ring is None:

        @checkpointed
        def whole_tile(tile: Any) -> Any:
            return finish(attend(arrays, keys, tile, start()))

        return jax.lax.map(whole_tile, tiles)

    @checkpointed
    def one_round(arrays: Any, keys: Any, states: Any) -> Any:
        @checkpointed
        def one_tile(tile_and_state: Any) -> Any:
            return attend(arrays, keys, *tile_and_state)

        return jax.lax.map(one_tile, (tiles, states))

    def visit(arrays: Any, keys: Any, states: Any) -> tuple[Any, Any]:
        # The keys are returned unchanged, so that the ring can send them while the round computes.
        return keys, one_round(arrays, keys, states)

    count = jax.tree.leaves(tiles)[0].shape[0]
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), start())
    _, states = fold_rounds(ring, arrays, keys, states, visit)
    return jax.vmap(finish)(states)
