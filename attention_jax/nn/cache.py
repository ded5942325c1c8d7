"""The keys and values that a self attention keeps while it decodes token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.functional.memory import Memory

Array = jax.Array


class KeyValueCache(NamedTuple):
    """The keys and values of the tokens so far, and room for more."""

    memory: Memory  # [*B, K, G or 1, max_length, ...], projected as the score wants them
    length: Array  # int32 [], how many tokens it holds


def appended(cache: KeyValueCache, new: Memory) -> KeyValueCache:
    """The cache with the next tokens, `new` [*B, K, G or 1, t, ...], after those that it holds."""

    def written(old: Array, new: Array, axis: int) -> Array:
        def write(old: Array, new: Array, length: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), length, axis)

        # Cut over Explicit mesh axes as the tokens are.
        return on_automatic_axes(write, explicit_spec(new), old, new, cache.length)

    token_axes: Any = (new.keys.map(lambda leaf, ndim: leaf.ndim - ndim), new.values.ndim - 2)
    memory = jax.tree.map(written, cache.memory, new, Memory(*token_axes))
    return KeyValueCache(memory, cache.length + new.values.shape[-2])
