"""Masks whose queries each see a window of consecutive keys, as two numbers for each query."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attention_jax.kernels.windows import (
    WINDOW_MASKS,
    bounds_of,
    parts_of,
    smallest_lengths,
)
from attention_jax.pairwise.masks import Mask

Array = jax.Array


def reason_against_mask(mask: Mask | None) -> str | None:
    """Why the mask is not a window for each query; None if it is."""
    for part in parts_of(mask):
        if not isinstance(part, WINDOW_MASKS):
            return (
                "takes causal_mask(...), local_mask(...), padding_mask(...) and their"
                f" conjunctions; got {type(part).__name__}"
            )
    return None


def windows(mask: Mask | None, target_length: int, source_length: int) -> Array:
    """int32 [2, T]: query i sees the keys first_i <= j < end_i, and none if the two are equal."""
    positions = jnp.arange(target_length, dtype=jnp.int32)
    first = jnp.zeros(target_length, jnp.int32)
    end = jnp.full(target_length, source_length, jnp.int32)
    far = target_length + source_length  # a larger distance could overflow
    left, right = bounds_of(mask)
    if left is not None:
        first = jnp.maximum(first, positions - min(left, far))
    if right is not None:
        end = jnp.minimum(end, positions + (max(min(right, far), -far) + 1))
    keys, queries = smallest_lengths(mask, target_length, source_length)
    if keys is not None and queries is not None:
        end = jnp.where(positions < queries, jnp.minimum(end, keys), 0)
    return jnp.stack([first, jnp.maximum(first, end)])


def visits(windows: Array, key_tiles: int, size: int) -> tuple[Array, Array]:
    """Which tiles of the other side each tile visits, from the first to the end.

    Args:
        windows: int32 [2, T], T a multiple of `size`.
        key_tiles: their number.
        size: of a tile.

    Returns:
        int32 ([query_tiles, 2], [key_tiles, 2]): for tiles of queries, and for tiles of keys.
    """
    first, end = windows
    sees_any = end > first
    firsts = jnp.where(sees_any, first, key_tiles * size).reshape(-1, size)
    ends = jnp.where(sees_any, end, 0).reshape(-1, size)
    first, end = jnp.min(firsts, axis=1) // size, -(-jnp.max(ends, axis=1) // size)
    first = jnp.minimum(first, end)
    tiles = jnp.arange(key_tiles, dtype=jnp.int32)[None, :]
    visited = (first[:, None] <= tiles) & (tiles < end[:, None])  # [query_tiles, key_tiles]
    last = visited.shape[0] - jnp.argmax(visited[::-1], axis=0)
    of_keys = jnp.stack([jnp.argmax(visited, axis=0), last], axis=1)
    of_keys = jnp.where(visited.any(0)[:, None], of_keys, 0)
    return jnp.stack([first, end], axis=1).astype(jnp.int32), of_keys.astype(jnp.int32)
