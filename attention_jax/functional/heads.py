"""Heads as batch axes: N query heads in K groups, where each group shares one key head.

The core knows no head axis. Queries come as [*B, K, G, T, D] and keys as [*B, K, 1, S, D], N = K G:
attention broadcasts the axis of size 1, so that keys and values are never repeated.
"""

import contextlib
from typing import Any

import jax

from attention_jax.functional.attention import capturing

Array = jax.Array


def group_heads(arrays: Any, core_ndims: Any, num_key_heads: int) -> Any:
    """[..., N, *core] -> [..., K, G, *core]; an array without a head axis is returned unchanged.

    Args:
        arrays: a pytree of arrays.
        core_ndims: the same pytree with the number of core axes of each array.
        num_key_heads: K.
    """

    def group(leaf: Array, core_ndim: int) -> Array:
        axis = leaf.ndim - core_ndim - 1
        if axis < 0:
            return leaf
        num_heads = leaf.shape[axis]
        split = (1, 1) if num_heads == 1 else (num_key_heads, num_heads // num_key_heads)
        return leaf.reshape(*leaf.shape[:axis], *split, *leaf.shape[axis + 1 :])

    return jax.tree.map(group, arrays, core_ndims)


def ungroup_heads(results: Any, batch_ndim: int) -> Any:
    """[*B, K, G, ...] -> [*B, N, ...] for every array in `results`."""

    def ungroup(leaf: Array) -> Array:
        batch, rest = leaf.shape[:batch_ndim], leaf.shape[batch_ndim + 2 :]
        num_heads = leaf.shape[batch_ndim] * leaf.shape[batch_ndim + 1]  # not -1: B may be 0
        return leaf.reshape(*batch, num_heads, *rest)

    return jax.tree.map(ungroup, results)


def heads_as_one_axis(batch_ndim: int) -> contextlib.AbstractContextManager[Any]:
    """A context in which `analysis.capture` gets batch axes [*B, K, G] as [*B, N]."""
    capture = capturing.value
    if capture is None:
        return contextlib.nullcontext()
    return capturing(capture._replace(grouped_heads=batch_ndim))


def group_positions(function: Any, shape: tuple[int, ...], num_key_heads: int) -> Any:
    """A `Mask` or `Bias` with the head axis N of its arrays split into [K, G]; None for None.

    Args:
        function: its arrays' leading axes broadcast to [*B, N].
        shape: (*B, N, T, S).
        num_key_heads: K.

    Raises:
        ValueError: an array does not broadcast.
    """
    if function is None:
        return None
    # Check before grouping: a wrong number of heads might broadcast to the groups.
    function.check(shape[:-2], *shape[-2:])
    return group_heads(function, function.core_ndims(), num_key_heads)
