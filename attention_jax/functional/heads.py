"""Heads as batch axes: N query heads in K groups, where each group shares one key head.

The core knows no head axis. Queries come as [*B, K, G, T, D] and keys as [*B, K, 1, S, D], N = K G:
attention broadcasts the axis of size 1, so that keys and values are never repeated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import any_array
from attention_jax.pairwise.biases import Bias, as_bias
from attention_jax.pairwise.masks import Mask, as_mask
from attention_jax.pairwise.position_functions import broadcasts

Array = jax.Array


def group_heads(leaf: Array, core_ndim: int, num_key_heads: int) -> Array:
    """[..., N, *core] -> [..., K, G, *core]; a leaf without a head axis is returned unchanged."""
    axis = leaf.ndim - core_ndim - 1
    if axis < 0:
        return leaf
    num_heads = leaf.shape[axis]
    split = (1, 1) if num_heads == 1 else (num_key_heads, num_heads // num_key_heads)
    return leaf.reshape(*leaf.shape[:axis], *split, *leaf.shape[axis + 1 :])


def ungroup_heads(results: Any, batch_ndim: int) -> Any:
    """[*B, K, G, ...] -> [*B, N, ...] for every array in `results`."""

    def ungroup(leaf: Array) -> Array:
        batch, rest = leaf.shape[:batch_ndim], leaf.shape[batch_ndim + 2 :]
        num_heads = leaf.shape[batch_ndim] * leaf.shape[batch_ndim + 1]  # not -1: B may be 0
        return leaf.reshape(*batch, num_heads, *rest)

    return jax.tree.map(ungroup, results)


def mask_for_heads(mask: Mask | Array, batch_ndim: int) -> Mask:
    """Gives a mask for inputs [*B, T, D] the head axis of inputs [*B, N, T, D].

    A table with one more axis than [*B, T, S], or an array of a `Mask` with one more axis than *B,
    already has a head axis. An array that lacks some axes of *B is returned unchanged; `check` then
    reports that it does not fit inputs [*B, N, T, D].
    """
    mask = as_mask(mask)

    def with_head_axis(leaf: Array, core_ndim: int) -> Array:
        axis = jnp.ndim(leaf) - core_ndim
        return jnp.expand_dims(leaf, axis) if axis == batch_ndim > 0 else leaf

    return jax.tree.map(with_head_axis, mask, mask.core_ndims())


def pairs_for_heads(
    mask: Mask | Array | None, bias: Bias | Array | None, shape: tuple[int, ...], num_key_heads: int
) -> tuple[Mask | None, Bias | None]:
    """Splits the head axis N of a mask and a bias into the groups [K, G].

    Args:
        mask: as `mask_for_heads` takes it.
        bias: a `Bias` whose arrays' leading axes broadcast to [*B, N], or an array that broadcasts
            to `shape`.
        shape: (*B, N, T, S).
        num_key_heads: K.

    Raises:
        ValueError: the mask or the bias does not broadcast.
    """
    *batch, _, target, source = shape
    if not (mask is None or isinstance(mask, Mask)):
        mask, shared = any_array("mask", mask), (*batch, target, source)
        if not any(broadcasts(mask.shape, full) for full in (shared, shape)):
            raise ValueError(
                f"mask must broadcast to {list(shared)} (*B, T, S), or be {list(shape)}"
                f" (*B, N, T, S); got {list(mask.shape)}"
            )

    def grouped(mask_or_bias: Any) -> Any:
        # Check before grouping: a wrong number of heads might broadcast to the groups.
        mask_or_bias.check(shape[:-2], target, source)
        return jax.tree.map(
            lambda leaf, core_ndim: group_heads(leaf, core_ndim, num_key_heads),
            mask_or_bias,
            mask_or_bias.core_ndims(),
        )

    return (
        None if mask is None else grouped(mask_for_heads(mask, len(batch))),
        None if bias is None else grouped(jax.tree.map(jnp.asarray, as_bias(bias))),
    )
