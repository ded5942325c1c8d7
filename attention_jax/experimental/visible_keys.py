"""What the queries of padded sequences see, and which tiles of keys they visit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.kernels.windows import Windows
from attention_jax.positions.contract import Mask
from attention_jax.positions.masks import padding_mask
from attention_jax.tiles.prepare import Plan, tile_statuses

Array = jax.Array


class VisibleKeys(NamedTuple):
    """The keys that the mask shows to each query, and to each tile of queries."""

    windows: Windows  # of sequences in whole tiles
    visited: Array  # bool [query_tiles, key_tiles] whether a query of the tile may see a key
    full: Array  # bool [query_tiles, key_tiles] whether all queries see all keys


def visible_keys(plan: Plan, mask: Mask | None, windows: Windows) -> VisibleKeys:
    """What the mask shows; queries that padding adds see what the last query sees.

    Args:
        plan: the tiles.
        mask: that of the call; the keys that padding adds are hidden.
        windows: of this mask, for T queries.
    """
    (target_length, source_length), (t, s) = plan.lengths, plan.padded_lengths
    unpadded = padding_mask(jnp.asarray(source_length))
    mask = unpadded if mask is None else mask & unpadded
    empty, full = tile_statuses(plan, mask)
    windows = windows.map(
        lambda row: jnp.pad(row, (0, t - target_length), mode="edge"),
        lambda row: jnp.pad(row, (0, s - source_length), mode="edge"),
    )
    return VisibleKeys(windows, ~empty, full & ~empty)


def ranges(flags: Array) -> Array:
    """The first flag that is set and the end after the last, of bool [n, m]: int32 [n, 2]."""
    first = jnp.argmax(flags, axis=1)
    end = flags.shape[1] - jnp.argmax(flags[:, ::-1], axis=1)
    both = jnp.stack([first, end], axis=1).astype(jnp.int32)
    return jnp.where(flags.any(axis=1)[:, None], both, 0)
