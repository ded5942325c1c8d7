"""The number of keys that each query may attend to, for normalisers that read it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.implementations.bias_tiles import Grid
from attention_jax.implementations.contract import Options

Array = jax.Array


def num_keys_of_tiles(
    options: Options, grid: Grid, num_keys: Array | None, source_length: int, dtype: Any
) -> Array | None:
    """The number of keys of each query, float [query_tiles, t]; None if the normaliser reads none.

    Args:
        options: those of the implementation.
        grid: the sizes and numbers of tiles.
        num_keys: int [query_tiles * t], from `tiling.used_tokens`; None if every query may attend
            to all keys.
        source_length: the number of all keys.
        dtype: of the result.
    """
    if not options.normalizer.uses_num_keys:
        return None
    shape = grid.tiles[0], grid.tile.query
    if num_keys is None:
        return jnp.full(shape, source_length, dtype)
    return num_keys.reshape(shape).astype(dtype)
