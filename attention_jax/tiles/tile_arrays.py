"""Arrays that are cut into tiles: padding, cutting and joining, reading and adding, positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def positions(tile: Array, size: int) -> Array:
    """The positions of a tile's entries in the sequence, int [size]."""
    return tile * size + jnp.arange(size)


def replace_and_pad(tokens: Array, length: int, used: Array | None, filler: Array | float) -> Array:
    """Tokens [length, ...]: `filler`, [1, ...] or a number, replaces unused tokens and pads.

    Args:
        tokens: at most `length` of them.
        length: the length of whole tiles.
        used: bool, for each of these tokens and perhaps for padding; None if all are used, and
            nothing is padded.
        filler: what stands in.
    """
    if used is None:
        return tokens
    # Replace before padding, so that no operation reads a NaN that a mask hides.
    count, *rest = tokens.shape
    filler = jnp.broadcast_to(jnp.asarray(filler, tokens.dtype), (1, *rest))
    tokens = jnp.where(used[:count].reshape(count, *[1] * len(rest)), tokens, filler)
    return jnp.concatenate([tokens, jnp.broadcast_to(filler, (length - count, *rest))])


def cut(array: Array, count: int) -> Array:
    """[length, ...] -> [count, length / count, ...]."""
    # A -1 in the shape would be ambiguous for arrays without features.
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])


def joined(tiles: Array, length: int) -> Array:
    """[count, t, ...] -> [length, ...], which drops the padding at the end."""
    return tiles.reshape(tiles.shape[0] * tiles.shape[1], *tiles.shape[2:])[:length]


def repeated(tiles: Array, count: int) -> Array:
    """Broadcasts a leading axis of size 1 to `count` tiles."""
    return jnp.broadcast_to(tiles, (count, *tiles.shape[1:]))


def tile_of(tiles: Any, index: Array) -> Any:
    """The tile at `index` of each leaf; a leaf with a single tile shares it among all indices."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(
            leaf, 0 if leaf.shape[0] == 1 else index, keepdims=False
        ),
        tiles,
    )


def add_tile(tiles: Any, index: Array, tile: Any) -> Any:
    """Adds the leaves of `tile` to the leaves of `tiles` at `index`."""
    return jax.tree.map(lambda leaf, addend: add_to_tile(leaf, (index,), addend), tiles, tile)


def add_to_tile(tiles: Array, index: tuple, addend: Array) -> Array:
    """`tiles.at[index].add(addend)` as an update of a slice, which needs no check of bounds."""
    start = (*index, *[0] * addend.ndim)
    old = jax.lax.dynamic_slice(tiles, start, (*[1] * len(index), *addend.shape))
    return jax.lax.dynamic_update_slice(tiles, old + addend.reshape(old.shape), start)
