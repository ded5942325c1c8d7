"""Functions that each device computes for its own examples of a batch, without communication.

On a batch that is sharded over devices, `lax.cond` has one predicate for all devices: whether any
example needs a branch takes a collective. A function under `on_each_device` is compiled for the
examples of one device, so that its predicates need no collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

Array = jax.Array
_NO_MESH = AbstractMesh((), ())


def on_each_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one example; under `jax.vmap`, each device computes its own part of the batch.

    The batch axes may be sharded, and all other axes are replicated, so that the function needs no
    communication. On one device, and inside of `jax.shard_map`, it equals `function` under
    `jax.vmap`. It has no derivatives: define them with `jax.custom_jvp`.

    Args:
        function: takes arrays; returns an array or a tuple of arrays. It must not use arrays from a
            closure.
    """
    return _at_level(function, 0)


@functools.cache
def _at_level(function: Callable[..., Any], level: int) -> Callable[..., Any]:
    """`function` of arrays with `level` batch axes, each of size 1 where an array lacks it."""

    @custom_vmap
    def call(*args: Array) -> Any:
        # XLA cannot call a partitioned function where only some axes of a mesh are manual.
        if level == 0 or jax.sharding.get_abstract_mesh().manual_axes:
            return _over_batch(function, level)(*args)
        batched = tuple(tuple(size != 1 for size in arg.shape[:level]) for arg in args)
        results = jax.eval_shape(_over_batch(function, level), *args)
        ndims = tuple(arg.ndim for arg in args)
        result_ndims = tuple(result.ndim for result in jax.tree.leaves(results))
        return _partitioned(function, level, batched, ndims, result_ndims)(*args)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Array) -> Any:
        del axis_size
        pairs = zip(args, in_batched, strict=True)
        aligned = [arg if is_batched else arg[None] for arg, is_batched in pairs]
        results = _at_level(function, level + 1)(*aligned)
        return results, jax.tree.map(lambda _: True, results)

    return call


@functools.cache
def _over_batch(function: Callable[..., Any], level: int) -> Callable[..., Any]:
    """`function` of arrays with `level` batch axes, jitted: JAX traces it once for many loops."""
    if level == 0:
        return jax.jit(function)
    inner = _over_batch(function, level - 1)

    @jax.jit
    def over_axis(*args: Array) -> Any:
        in_axes = tuple(None if arg.shape[0] == 1 else 0 for arg in args)  # size 1: shared
        pairs = zip(args, in_axes, strict=True)
        args = tuple(arg[0] if axis is None else arg for arg, axis in pairs)
        if all(axis is None for axis in in_axes):
            return jax.tree.map(lambda result: result[None], inner(*args))
        return jax.vmap(inner, in_axes=in_axes)(*args)

    return over_axis


@functools.cache
def _partitioned(
    function: Callable[..., Any],
    level: int,
    batched: tuple[tuple[bool, ...], ...],  # for each argument: whether it has each batch axis
    ndims: tuple[int, ...],
    result_ndims: tuple[int, ...],
) -> Callable[..., Any]:
    """The function with a rule for XLA: only batch axes may be sharded."""
    over_batch = _over_batch(function, level)
    partitioned = custom_partitioning(over_batch)

    def on_one_device(*args: Array) -> Any:
        # The program of one device must not constrain shardings over the mesh of `jax.set_mesh`.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return over_batch(*args)

    replicated: list[str] = []

    def axis_names(ndim: int, has_axis: tuple[bool, ...]) -> str:
        names = []
        for axis in range(ndim):
            if axis < level and has_axis[axis]:
                names.append(f"batch{axis}")
            else:
                replicated.append(f"whole{len(replicated)}")
                names.append(replicated[-1])
        return " ".join(names)

    inputs = ", ".join(map(axis_names, ndims, batched))
    batched_in_any = tuple(map(any, zip(*batched, strict=True)))
    outputs = ", ".join(axis_names(ndim, batched_in_any) for ndim in result_ndims)

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        spec = jax.tree.leaves(results)[0].sharding.spec[:level]

        def sharding(has_axis: tuple[bool, ...]) -> NamedSharding:
            pairs = zip(spec, has_axis, strict=True)
            return NamedSharding(
                mesh, PartitionSpec(*(name if has else None for name, has in pairs))
            )

        result_shardings = jax.tree.map(lambda _: sharding(batched_in_any), results)
        return mesh, on_one_device, result_shardings, tuple(map(sharding, batched))

    partitioned.def_partition(
        partition=partition,
        sharding_rule=f"{inputs} -> {outputs}",
        need_replication_factors=tuple(replicated),
    )
    return partitioned
