"""Lookup of rows in a table, on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import explicit_spec, on_automatic_axes

Array = jax.Array


def rows_of(table: Array, ids: Array) -> Array:
    """`jnp.take(table, ids, axis=0)`; on a mesh with Explicit axes, sharded as `ids` are.

    >>> rows_of(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0, 1])).tolist()
    [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    """

    def take(table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0)

    return on_automatic_axes(take, explicit_spec(ids), table, ids)
