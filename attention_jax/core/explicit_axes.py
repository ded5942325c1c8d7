"""Meshes with `Explicit` axes, whose cuts are part of every array's type.

`jax.make_mesh` makes such axes by default. The type of each intermediate array then says over which
mesh axes the array is cut, and an operation whose operands are cut differently is an error. Code
for every layout (a loop over tiles, an index, a mask that only some inputs have) cannot say how
each intermediate is cut. `on_automatic_axes` runs such code as on a mesh with `Auto` axes, where
the compiler places the intermediates, and gives the results their cuts back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Results = TypeVar("Results")


def on_automatic_axes(
    function: Callable[..., Results], spec: PartitionSpec, *arrays: Any
) -> Results:
    """`function(*arrays)`, computed as if the Explicit axes of the mesh were Auto axes.

    Where there are no Explicit axes (no mesh, Auto axes, inside of `jax.shard_map`) it is the plain
    call. It works under `jit`, `vmap` and every derivative, with and without `jax.set_mesh`.

    Args:
        function: takes and returns pytrees of arrays. Every array that it computes with must be an
            argument: an array from a closure keeps its Explicit type.
        spec: how the leading axes of each result are cut over Explicit axes; a result with fewer
            axes takes the first entries only. `explicit_spec(array)` gives an array's own.
        arrays: pytrees of arrays.

    Returns:
        what `function` returns.

    >>> import jax.numpy as jnp
    >>> table, ids = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 1, 0])
    >>> on_automatic_axes(lambda table, ids: table[ids, 0], explicit_spec(ids), table, ids)
    Array([3., 3., 1.], dtype=float32)
    """
    mesh = _mesh_of(arrays)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == AxisType.Explicit]
    if not explicit:
        return function(*arrays)
    # As `jax.sharding.auto_axes` does, which has to know the results' shapes before it computes.
    automatic = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(automatic):
        results = function(*jax.sharding.reshard(arrays, PartitionSpec()))

    def cut(result: jax.Array) -> jax.Array:
        cuts = PartitionSpec(*spec[: result.ndim])
        return jax.sharding.reshard(result, NamedSharding(mesh, cuts))

    return jax.tree.map(cut, results)


def explicit_spec(array: Any) -> PartitionSpec:
    """Over which Explicit mesh axes each axis of an array is cut; one entry for each axis.

    >>> import jax.numpy as jnp
    >>> tuple(explicit_spec(jnp.ones((2, 3))))
    (None, None)
    """
    sharding = jax.typeof(array).sharding
    return PartitionSpec(*(*sharding.spec, *[None] * (array.ndim - len(sharding.spec))))


def _mesh_of(arrays: Any) -> AbstractMesh:
    """The mesh of `jax.set_mesh`, or else the one in the arrays' types; it may be empty."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])
