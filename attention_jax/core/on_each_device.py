"""Decisions that each device takes for its own examples of a batch.

On a batch that is cut up over devices, `lax.cond` has one predicate for all devices: whether any
example needs the careful branch is asked of all of them, a collective for every decision. A
function under `on_each_device` is compiled for the examples of one device, and asks nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array


def on_each_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one example; under `jax.vmap`, each device computes its own part of the batch.

    The batch axes may be cut up over devices and all other axes are whole, so that there is nothing
    to send inside. On one device, and inside of `jax.shard_map`, it is `function` under `jax.vmap`.
    It has no derivatives of its own: give it some with `jax.custom_jvp`.

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
        # Where some axes of a mesh are manual and others are not, XLA cannot call it.
        if level == 0 or jax.sharding.get_abstract_mesh().manual_axes:
            return _over_batch(function, level, *args)
        batched = tuple(tuple(size != 1 for size in arg.shape[:level]) for arg in args)
        results = jax.eval_shape(functools.partial(_over_batch, function, level), *args)
        ndims = tuple(arg.ndim for arg in args)
        result_ndims = tuple(result.ndim for result in jax.tree.leaves(results))
        return _partitioned(function, level, batched, ndims, result_ndims)(*args)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Array) -> Any:
        del axis_size
        aligned = [arg if cut else arg[None] for arg, cut in zip(args, in_batched, strict=True)]
        results = _at_level(function, level + 1)(*aligned)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _over_batch(function: Callable[..., Any], level: int, *args: Array) -> Any:
    if level == 0:
        return function(*args)
    inner = functools.partial(_over_batch, function, level - 1)
    shared = [arg.shape[0] == 1 for arg in args]
    args = tuple(arg[0] if alone else arg for arg, alone in zip(args, shared, strict=True))
    if all(shared):
        return jax.tree.map(lambda result: result[None], inner(*args))
    return jax.vmap(inner, in_axes=tuple(None if alone else 0 for alone in shared))(*args)


@functools.cache
def _partitioned(
    function: Callable[..., Any],
    level: int,
    batched: tuple[tuple[bool, ...], ...],  # of each argument and batch axis
    ndims: tuple[int, ...],
    result_ndims: tuple[int, ...],
) -> Callable[..., Any]:
    """The function, with a rule for the compiler: batch axes may be cut, no other axis."""
    partitioned = custom_partitioning(functools.partial(_over_batch, function, level))
    whole: list[str] = []

    def axes(ndim: int, batched: tuple[bool, ...]) -> str:
        names = [f"batch{n}" if cut else None for n, cut in enumerate(batched)]
        names += [None] * (ndim - level)
        for axis, name in enumerate(names):
            if name is None:
                whole.append(f"whole{len(whole)}")
                names[axis] = whole[-1]
        return " ".join(map(str, names))

    inputs = ", ".join(map(axes, ndims, batched))
    anywhere = tuple(map(any, zip(*batched, strict=True)))
    outputs = ", ".join(axes(ndim, anywhere) for ndim in result_ndims)

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        cuts = jax.tree.leaves(results)[0].sharding.spec[:level]

        def sharding(batched: tuple[bool, ...]) -> NamedSharding:
            own = [cut if here else None for cut, here in zip(cuts, batched, strict=True)]
            return NamedSharding(mesh, PartitionSpec(*own))

        of_results = jax.tree.map(lambda _: sharding(anywhere), results)
        on_one = functools.partial(_over_batch, function, level)
        return mesh, on_one, of_results, tuple(map(sharding, batched))

    partitioned.def_partition(
        partition=partition,
        sharding_rule=f"{inputs} -> {outputs}",
        need_replication_factors=tuple(whole),
    )
    return partitioned
