"""Arrays in tiles: the tile of an index, its positions, and adding to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def positions(tile: Array, size: int) -> Array:
    """Int [size], where the entries of a tile stand in the sequence."""
    return tile * size + jnp.arange(size)


def tiled(array: Array, count: int) -> Array:
    """[length, ...] -> [count, length / count, ...]."""
    # No -1, which has no meaning where there are no features.
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])


def untiled(tiles: Array, length: int) -> Array:
    """[count, t, ...] -> [length, ...]: without the padding."""
    return tiles.reshape(tiles.shape[0] * tiles.shape[1], *tiles.shape[2:])[:length]


def tile_of(tiles: Any, index: Array) -> Any:
    """One tile; an axis of one tile stands for all of them."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(
            leaf, 0 if leaf.shape[0] == 1 else index, keepdims=False
        ),
        tiles,
    )


def add_tile(tiles: Any, index: Array, tile: Any) -> Any:
    """Each leaf with a tile of its own added at `index`."""
    return jax.tree.map(lambda leaf, addend: add_to_tile(leaf, (index,), addend), tiles, tile)


def add_to_tile(tiles: Array, index: tuple, addend: Array) -> Array:
    """`tiles.at[index].add(addend)`, as a slice: a scatter would be checked for its bounds."""
    start = (*index, *[0] * addend.ndim)
    old = jax.lax.dynamic_slice(tiles, start, (*[1] * len(index), *addend.shape))
    return jax.lax.dynamic_update_slice(tiles, old + addend.reshape(old.shape), start)
