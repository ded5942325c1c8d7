"""Arrays on meshes: types that name mesh axes, and the casts that code for any mesh needs.

The type of an array can name the axes of a mesh in two ways.

- Axes that are `Explicit` (those of `jax.make_mesh`): the type of each array names the mesh axes
  over which it is sharded, and an operation on operands with different shardings is an error. Code
  for arbitrary shardings (a loop over tiles, an index, a mask that only some inputs have) cannot
  state the sharding of each intermediate. `on_automatic_axes` runs such code as on a mesh with
  `Auto` axes, where the compiler shards the intermediates, and then shards the results explicitly.
- Inside `jax.shard_map`: the type of each array names the mesh axes over which its value differs
  between devices. A loop's carry must keep its type, but a constant initial carry varies over no
  axis: `varying_as` gives it the axes of the arrays that the loop reads.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Results = TypeVar("Results")
Tree = TypeVar("Tree")

# --- Explicit axes ---


def on_automatic_axes(
    function: Callable[..., Results], spec: PartitionSpec, *arrays: Any
) -> Results:
    """`function(*arrays)`, computed as if the Explicit axes of the mesh were Auto axes.

    Without Explicit axes (no mesh, Auto axes, inside of `jax.shard_map`) it is a plain call. It
    works under `jit`, `vmap` and every derivative, with and without `jax.set_mesh`.

    Args:
        function: takes and returns pytrees of arrays. All its arrays must be arguments: an array
            from a closure keeps its Explicit type.
        spec: the sharding of the leading axes of each result over Explicit axes; a result with
            fewer axes takes only the first entries. See `explicit_spec` for an array's own spec.
        arrays: pytrees of arrays.

    Returns:
        the result of `function`.

    >>> import jax.numpy as jnp
    >>> table, ids = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 1, 0])
    >>> on_automatic_axes(lambda table, ids: table[ids, 0], explicit_spec(ids), table, ids)
    Array([3., 3., 1.], dtype=float32)
    """
    # That of `jax.set_mesh`, or else that of the arrays' types; it may be empty.
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(arrays)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, axis_type in types if axis_type == AxisType.Explicit]
    if not explicit:
        return function(*arrays)
    # `jax.sharding.auto_axes` does the same, but must know the results' shapes in advance.
    automatic = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(automatic):
        results = function(*jax.sharding.reshard(arrays, PartitionSpec()))

    def shard(result: jax.Array) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec[: result.ndim]))
        return jax.sharding.reshard(result, sharding)

    return jax.tree.map(shard, results)


def explicit_spec(array: Any) -> PartitionSpec:
    """The Explicit mesh axes over which each axis of an array is sharded; an entry for each axis.

    >>> import jax.numpy as jnp
    >>> tuple(explicit_spec(jnp.ones((2, 3))))
    (None, None)
    """
    sharding = jax.typeof(array).sharding
    return PartitionSpec(*(*sharding.spec, *[None] * (array.ndim - len(sharding.spec))))


# --- inside jax.shard_map ---


def varying_as(tree: Tree, *references: object) -> Tree:
    """`tree` with its arrays cast to vary over all mesh axes that `references` vary over.

    Outside of `jax.shard_map` it does nothing. Its transpose is a sum over devices, so call it
    before a loop, not inside of it.

    Args:
        tree: a pytree of arrays.
        references: pytrees of arrays.
    """
    axes = varying_axes(references)
    if not axes:
        return tree

    def cast(leaf: jax.Array) -> jax.Array:
        missing = axes - varying_axes(leaf)
        return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def varying_axes(tree: object) -> frozenset[str]:
    """The mesh axes over which an array of `tree` differs between devices."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))
