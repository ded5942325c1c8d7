"""Casts of the mesh axes that an array varies over, inside `jax.shard_map`.

With its default checks, `shard_map` gives every array a type that names the mesh axes over which
its value differs between devices. A loop's carry must keep its type, but a constant initial carry
varies over no axis: `varying_as` gives it the axes of the arrays that the loop reads.
"""

from __future__ import annotations

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def varying_as(tree: Tree, *references: object) -> Tree:
    """`tree` with its arrays cast to vary over all mesh axes that `references` vary over.

    Outside of `jax.shard_map` it does nothing. Its transpose is a sum over devices, so call it
    before a loop, not inside of it.

    Args:
        tree: a pytree of arrays.
        references: pytrees of arrays.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(references)))
    if not axes:
        return tree

    def cast(leaf: jax.Array) -> jax.Array:
        missing = axes - _varying(leaf)
        return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def varying_type(like: jax.ShapeDtypeStruct, *references: object) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over all mesh axes that `references` vary over.

    `pallas_call` asks for it inside `jax.shard_map`; elsewhere it is `like`.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(references)))
    manual = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(like.shape, like.dtype, manual_axis_type=manual)


def is_varying(tree: object) -> bool:
    """Whether an array varies over a mesh axis, as the checks of `jax.shard_map` know it."""
    return any(map(_varying, jax.tree.leaves(tree)))


def _varying(leaf: object) -> frozenset[str]:
    return frozenset(jax.typeof(leaf).manual_axis_type.varying)
