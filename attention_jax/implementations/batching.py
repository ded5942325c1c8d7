"""From one example to many: `jax.vmap` over the batch axes that the inputs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from attention_jax.implementations.contract import Inputs
from attention_jax.scores import Score

Array = jax.Array


def vmap_over_batch(
    score: Score, function: Callable[..., Any], inputs: Inputs, *others: tuple[Array, int]
) -> Any:
    """`function` of one example, applied to inputs with leading batch axes *B.

    A leaf that lacks a batch axis, or has it with size 1, is shared and never copied.

    Args:
        score: the score whose `params` are in `inputs`.
        function: takes `Inputs` without batch axes, then the others; returns a pytree of arrays.
        inputs: query has exactly the axes *B; key, value and the leaves of params, mask and bias
            any that broadcast to it; dropout_rng, one key, is split.
        others: further arrays whose leading axes broadcast to *B, and how many axes each has
            without them.

    Returns:
        what `function` returns, each leaf with the axes *B in front.
    """
    batch_shape = inputs.query.shape[:-2]
    if inputs.dropout_rng is not None:
        inputs = inputs._replace(dropout_rng=jax.random.split(inputs.dropout_rng, batch_shape))
    axes = [axis for axis, size in enumerate(batch_shape) if size != 1]
    leaves, structure = jax.tree.flatten((inputs, *(array for array, _ in others)))
    core_ndims = jax.tree.leaves((_core_ndims(score, inputs), *(ndim for _, ndim in others)))
    in_axes = []
    for index, (leaf, core_ndim) in enumerate(zip(leaves, core_ndims, strict=True)):
        core = leaf.shape[leaf.ndim - core_ndim :]
        own = leaf.shape[: leaf.ndim - core_ndim]
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


def _core_ndims(score: Score, inputs: Inputs) -> Any:
    """`inputs` with every array replaced by its number of axes without batch axes."""
    query_dim, key_dim = inputs.query.shape[-1], inputs.key.shape[-1]
    param_shapes = score.param_shapes(inputs.params, query_dim, key_dim)
    return (
        2,  # query
        2,  # key
        2,  # value
        jax.tree.map(lambda leaf: len(leaf.shape), param_shapes),
        None if inputs.mask is None else inputs.mask.core_ndims(),
        None if inputs.bias is None else inputs.bias.core_ndims(),
        None if inputs.dropout_rng is None else 0,
    )
