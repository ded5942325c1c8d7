"""Conjunctions of causal, local and padding masks, read as windows of consecutive keys.

Other masks in a conjunction are passed over: refuse them first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from attention_jax.pairwise.mask_algebra import AndMask
from attention_jax.pairwise.masks import CausalMask, LocalMask, Mask, PaddingMask

Array = jax.Array

WINDOW_MASKS = (CausalMask, LocalMask, PaddingMask)


def parts_of(mask: Mask | None) -> list[Mask]:
    """The masks whose conjunction is `mask`."""
    if mask is None:
        return []
    if isinstance(mask, AndMask):
        return [*parts_of(mask.left), *parts_of(mask.right)]
    return [mask]


def bounds_of(mask: Mask | None) -> tuple[int | None, int | None]:
    """(left, right): query i sees i - left <= j <= i + right; None for no bound."""
    parts = parts_of(mask)
    causal = [part.offset for part in parts if isinstance(part, CausalMask)]
    local = [part for part in parts if isinstance(part, LocalMask)]
    left = [part.left for part in local if part.left is not None]
    right = [part.right for part in local if part.right is not None]
    return min(left, default=None), min([*causal, *right], default=None)


def smallest_lengths(
    mask: Mask | None, target_length: int, source_length: int
) -> tuple[Array | None, Array | None]:
    """(number of keys, number of queries) that padding leaves, int32 []; None without padding."""
    padding = [part for part in parts_of(mask) if isinstance(part, PaddingMask)]
    if not padding:
        return None, None
    keys = [part.key_lengths for part in padding]
    queries = [part.query_lengths for part in padding if part.query_lengths is not None]

    def smallest(lengths: list[Array], most: int) -> Array:
        in_range = [jnp.clip(length, 0, most).astype(jnp.int32) for length in lengths]
        return functools.reduce(jnp.minimum, in_range, jnp.asarray(most, jnp.int32))

    return smallest(keys, source_length), smallest(queries, target_length)
