"""Heads as batch axes: N query heads in K groups, each group reading one head of keys.

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


def group_heads(leaf: Array, core_ndim: int, key_heads: int) -> Array:
    """[.., N, *core] as [.., K, G, *core]; without a head axis, as it is."""
    axis = leaf.ndim - core_ndim - 1
    if axis < 0:
        return leaf
    heads = leaf.shape[axis]
    split = (1, 1) if heads == 1 else (key_heads, heads // key_heads)
    return leaf.reshape(*leaf.shape[:axis], *split, *leaf.shape[axis + 1 :])


def ungroup_heads(results: Any, batch_ndim: int) -> Any:
    """[*B, K, G, ...] as [*B, N, ...], of every array."""

    def ungroup(leaf: Array) -> Array:
        batch, rest = leaf.shape[:batch_ndim], leaf.shape[batch_ndim + 2 :]
        heads = leaf.shape[batch_ndim] * leaf.shape[batch_ndim + 1]  # no -1: B may be 0
        return leaf.reshape(*batch, heads, *rest)

    return jax.tree.map(ungroup, results)


def mask_for_heads(mask: Mask | Array, batch_ndim: int) -> Mask:
    """A mask of inputs [*B, T, D] as one of inputs [*B, N, T, D].

    An array with an axis more than [*B, T, S] has its head axis already; so has an array of a
    `Mask` with an axis more than *B. One that lacks some of *B stays as it is, and is no mask of
    inputs [*B, N, T, D] either: `check` says so.
    """
    mask = as_mask(mask)

    def with_head_axis(leaf: Array, core_ndim: int) -> Array:
        own = jnp.ndim(leaf) - core_ndim
        return jnp.expand_dims(leaf, own) if own == batch_ndim > 0 else leaf

    return jax.tree.map(with_head_axis, mask, mask.core_ndims())


def pairs_for_heads(
    mask: Mask | Array | None, bias: Bias | Array | None, shape: tuple[int, ...], key_heads: int
) -> tuple[Mask | None, Bias | None]:
    """A mask and a bias of inputs [*B, N, T, D] as those of inputs [*B, K, G, T, D].

    Args:
        mask: as `mask_for_heads` takes it.
        bias: a `Bias` whose arrays' leading axes broadcast to [*B, N], or an array that broadcasts
            to `shape`.
        shape: (*B, N, T, S).
        key_heads: K.

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

    def grouped(pairs: Any) -> Any:
        # Checked here, where heads are still one axis: another number of them might fit the groups.
        pairs.check(shape[:-2], target, source)
        return jax.tree.map(
            lambda leaf, core_ndim: group_heads(leaf, core_ndim, key_heads),
            pairs,
            pairs.core_ndims(),
        )

    return (
        None if mask is None else grouped(mask_for_heads(mask, len(batch))),
        None if bias is None else grouped(jax.tree.map(jnp.asarray, as_bias(bias))),
    )
