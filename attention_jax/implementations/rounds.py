"""How keys come to the queries of a device: all at once, or one device's share per round of a ring.

What is done with a tile does not depend on where its keys come from. `tiled`, its tangent and its
twin hand their work on a tile to the two functions here, which call it for every tile: on one
device for all keys, in a ring for the keys that have come in each round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Visit = Callable[[Any, Any, Any], tuple[Any, Any]]


class Rounds(Protocol):
    """A ring of devices, as these functions see it."""

    def fold(self, constants: Any, keys: Any, carry: Any, visit: Visit) -> tuple[Any, Any]:
        """See `fold_rounds`."""


def fold_rounds(
    ring: Rounds | None, constants: Any, keys: Any, carry: Any, visit: Visit
) -> tuple[Any, Any]:
    """`keys, carry = visit(constants, keys, carry)`, once per round.

    Args:
        ring: None for one round with all keys.
        constants: what no gradient reaches; a ring turns it into the constants of each round.
        keys: a pytree of everything that belongs to keys (features, values, their gradients). A
            ring passes it on to the next device after each round.
        carry: a pytree that stays.
        visit: the work of one round.

    Returns:
        the keys, back on the device where they began, and the last carry.
    """
    if ring is None:
        return visit(constants, keys, carry)
    return ring.fold(constants, keys, carry, visit)


def map_query_tiles(
    ring: Rounds | None,
    constants: Any,
    keys: Any,
    tiles: Any,
    *,
    start: Callable[[], Any],
    attend: Callable[[Any, Any, Any, Any], Any],
    finish: Callable[[Any], Any],
    recompute: bool = False,
) -> Any:
    """For each tile of queries `finish(state)`, with `state = attend(..., state)` in every round.

    Args:
        ring: as in `fold_rounds`.
        constants: the same.
        keys: the same.
        tiles: a pytree of arrays [query_tiles, ...], the queries and what belongs to them.
        start: makes the state of one tile of queries that has attended to no key.
        attend: takes (constants, keys, tile, state) and returns the next state.
        finish: makes the result of one tile.
        recompute: whether the gradient computes each step again rather than save what is in it.

    Returns:
        the results, each with a leading axis [query_tiles].
    """

    # Checkpointed twice, since each reverse pass takes one checkpoint away: with one, the reverse
    # mode of the reverse mode saves all keys for every tile of queries. It costs no time.
    def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(jax.checkpoint(function)) if recompute else function

    if ring is None:

        @checkpointed
        def whole_tile(tile: Any) -> Any:
            return finish(attend(constants, keys, tile, start()))

        return jax.lax.map(whole_tile, tiles)

    @checkpointed
    def one_round(constants: Any, keys: Any, states: Any) -> Any:
        @checkpointed
        def one_tile(tile_and_state: Any) -> Any:
            return attend(constants, keys, *tile_and_state)

        return jax.lax.map(one_tile, (tiles, states))

    def visit(constants: Any, keys: Any, states: Any) -> tuple[Any, Any]:
        # The keys are returned as they came, so that they travel while the round computes.
        return keys, one_round(constants, keys, states)

    count = jax.tree.leaves(tiles)[0].shape[0]
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), start())
    _, states = ring.fold(constants, keys, states, visit)
    return jax.vmap(finish)(states)
