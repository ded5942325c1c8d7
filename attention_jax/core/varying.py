"""Arrays inside `jax.shard_map`: which mesh axes they vary over.

With its default checks, `shard_map` gives every array a type that names the mesh axes over which
its value differs between devices, and a loop's carry must keep its type. A carry that starts as a
constant varies over nothing; here it is given the axes of the arrays that the loop will read.
"""

from __future__ import annotations

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def varying_as(tree: Tree, *references: object) -> Tree:
    """`tree`, its arrays varying over all mesh axes that any array of `references` varies over.

    Outside of `jax.shard_map` it does nothing. Its transpose is a sum over devices: call it once,
    before a loop, and never inside of one.

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


def _varying(leaf: object) -> frozenset[str]:
    return frozenset(jax.typeof(leaf).manual_axis_type.varying)
