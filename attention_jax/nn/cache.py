"""The keys and values that a self attention keeps while it decodes token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from attention_jax.core.checks import check_entries
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


def check_cache(cache: KeyValueCache, x: Array, num_key_heads: int, head_dim: int) -> None:
    """Raises ValueError unless the cache is of that many heads and has room for x [*B, t, D]."""
    *_, room, cached_dim = cache.memory.values.shape
    expected = (*x.shape[:-2], num_key_heads, 1, room, head_dim)
    if cache.memory.values.shape != expected:
        raise ValueError(
            f"cache must be this module's empty_cache({x.shape[:-2]}, ...) for x"
            f" {list(x.shape)}; got one of {num_key_heads} heads of {cached_dim} with values"
            f" {list(cache.memory.values.shape)}"
        )
    if x.shape[-2] > room:
        raise ValueError(
            f"x must have at most {room} tokens, the cache's max_length; got {x.shape[-2]}"
        )
    name = f"cache.length before {x.shape[-2]} more of at most {room} tokens"
    check_entries(name, cache.length, 0, room - x.shape[-2])
