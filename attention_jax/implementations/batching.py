"""From one example to many: `jax.vmap` over the batch axes that the inputs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from attention_jax.core.explicit_axes import explicit_spec, on_automatic_axes
from attention_jax.core.varying import varying_as
from attention_jax.implementations.contract import Inputs
from attention_jax.scores import Params, ProjectedKeys, Score

Array = jax.Array


def vmap_over_batch(
    score: Score,
    function: Callable[..., Any],
    inputs: Inputs,
    *others: tuple[Array, int],
    by_query: bool = False,
) -> Any:
    """`function` of one example, applied to inputs with leading batch axes *B.

    A leaf that lacks a batch axis, or has it with size 1, is shared and never copied. On a mesh
    with Explicit axes the compiler places what is inside, and the batch axes of each result are cut
    as those of query, key and value are.

    Args:
        score: the score whose `params` are in `inputs`.
        function: takes `Inputs` without batch axes, then the others; returns a pytree of arrays.
            It must not use arrays from a closure.
        inputs: query has exactly the axes *B; key, value and the leaves of params, mask and bias
            any that broadcast to it; dropout_rng, one key, is split.
        others: further arrays whose leading axes broadcast to *B, and how many axes each has
            without them.
        by_query: whether T follows *B in every result, which is then cut as the query's T is.

    Returns:
        what `function` returns, each leaf with the axes *B in front.
    """
    spec = explicit_batch_spec(inputs)
    if by_query:
        spec = PartitionSpec(*spec, explicit_spec(inputs.query)[-2])
    arrays, ndims = zip(*others, strict=True) if others else ((), ())

    def batched(inputs: Inputs, *arrays: Array) -> Any:
        return _vmapped(score, function, inputs, arrays, ndims)

    return on_automatic_axes(batched, spec, inputs, *arrays)


def explicit_batch_spec(inputs: Inputs) -> PartitionSpec:
    """How *B is cut over Explicit axes: as the query's, or where that is whole, as the key's."""
    batch_ndim = inputs.query.ndim - 2
    cuts: list[Any] = [None] * batch_ndim
    for tokens in (inputs.query, jax.tree.leaves(inputs.key)[0], inputs.value):
        own = explicit_spec(tokens)[:-2]
        for axis, cut in enumerate(own, start=batch_ndim - len(own)):
            if cuts[axis] is None and cut not in cuts:
                cuts[axis] = cut
    return PartitionSpec(*cuts)


def _vmapped(
    score: Score,
    function: Callable[..., Any],
    inputs: Inputs,
    others: tuple[Array, ...],
    other_ndims: tuple[int, ...],
) -> Any:
    # In `jax.shard_map`: here, since what has to vary inside of a loop would, in the gradient, be
    # summed over devices in every step.
    inputs, others = varying_as((inputs, others), inputs, others)
    batch_shape = inputs.query.shape[:-2]
    if inputs.dropout_rng is not None:
        inputs = inputs._replace(dropout_rng=jax.random.split(inputs.dropout_rng, batch_shape))
    core_ndims = (_core_ndims(score, inputs), *other_ndims)
    return map_over_batch(function, batch_shape, (inputs, *others), core_ndims)


def map_over_batch(
    function: Callable[..., Any],
    batch_shape: tuple[int, ...],
    arguments: tuple[Any, ...],
    core_ndims: tuple[Any, ...],
) -> Any:
    """`function` of one example, applied to arguments with leading batch axes.

    Args:
        function: takes the arguments without batch axes; returns a pytree of arrays.
        batch_shape: *B.
        arguments: pytrees whose leaves' leading axes broadcast to *B.
        core_ndims: the same pytrees, with each leaf's number of axes without batch axes.

    Returns:
        what `function` returns, each leaf with the axes *B in front.
    """
    axes = [axis for axis, size in enumerate(batch_shape) if size != 1]
    leaves, structure = jax.tree.flatten(arguments)
    in_axes = []
    for index, (leaf, ndim) in enumerate(zip(leaves, jax.tree.leaves(core_ndims), strict=True)):
        core = leaf.shape[leaf.ndim - ndim :]
        own = leaf.shape[: leaf.ndim - ndim]
        own = (1,) * (len(batch_shape) - len(own)) + own
        leaves[index] = leaf.reshape([size for size in own if size != 1] + list(core))
        in_axes.append([None if own[axis] == 1 else 0 for axis in axes])

    def batched(*leaves: Array) -> Any:
        return function(*jax.tree.unflatten(structure, leaves))

    for leaf_axes in reversed(list(zip(*in_axes, strict=True))):  # innermost batch axis first
        batched = jax.vmap(batched, in_axes=leaf_axes)
    return jax.tree.map(
        lambda out: out.reshape(batch_shape + out.shape[len(axes) :]), batched(*leaves)
    )


def core_ndims_of_params(score: Score, params: Params, query_dim: int, key_dim: int) -> Params:
    """`params` with every array replaced by its number of axes without batch axes."""
    shapes = score.param_shapes(params, query_dim, key_dim)
    return jax.tree.map(lambda leaf: len(leaf.shape), shapes)


def _core_ndims(score: Score, inputs: Inputs) -> Any:
    """`inputs` with every array replaced by its number of axes without batch axes."""
    return (
        2,  # query
        inputs.key.map(lambda _, ndim: ndim) if isinstance(inputs.key, ProjectedKeys) else 2,
        2,  # value
        core_ndims_of_params(score, inputs.params, inputs.query.shape[-1], inputs.key.shape[-1]),
        None if inputs.mask is None else inputs.mask.core_ndims(),
        None if inputs.bias is None else inputs.bias.core_ndims(),
        None if inputs.dropout_rng is None else 0,
    )
