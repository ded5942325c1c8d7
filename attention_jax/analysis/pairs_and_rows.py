"""Checks of arguments [*B, T, S], and means over the queries that count, for all statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.analysis.entropy_terms import is_zero
from attention_jax.core.arrays import accumulator_dtype, any_array, float_array
from attention_jax.pairwise.masks import as_mask
from attention_jax.pairwise.position_functions import broadcasts, check_batch_axes

Array = jax.Array


def checked_pairs(name: str, value: Any) -> Array:
    """Floats [*B, T, S], in at least float32."""
    array = float_array(name, value)
    if array.ndim < 2:
        raise ValueError(f"{name} must be [*B, T, S]; got {list(array.shape)}")
    return array.astype(accumulator_dtype(array))


def checked_mask(mask: Any, pairs: Array) -> Array:
    """Which of the pairs are allowed: bool [*B, T, S]."""
    if mask is None:
        return jnp.ones(pairs.shape, bool)
    *batch_shape, target_length, source_length = pairs.shape
    mask = as_mask(mask)
    mask.check(tuple(batch_shape), target_length, source_length)
    return jnp.broadcast_to(mask.materialize(target_length, source_length), pairs.shape)


def checked_rows(rows: Any, weights: Array) -> Array:
    """Which queries count: bool [*B, T]."""
    if rows is None:
        return jnp.ones(weights.shape[:-1], bool)
    return _per_query("rows", rows, jnp.bool_, "boolean, True = counts", weights)


def checked_alignment(alignment: Any, weights: Array) -> Array:
    """Each query's key: int32 or int64 [*B, T]."""
    array = _per_query("alignment", alignment, jnp.integer, "integers", weights)
    # Unsigned numbers that are too large become negative, which is out of range too.
    return array.astype(jnp.int64 if array.dtype.itemsize == 8 else jnp.int32)


def only_rows(weights: Array, rows: Array) -> Array:
    """Sets the rows of queries that do not count to 0, whatever their values."""
    return jnp.where(rows[..., None], weights, 0)


def has_keys(weights: Array) -> Array:
    """Whether each query attends to any key: bool [*B, T]."""
    return ~jnp.all(is_zero(weights), axis=-1)


def mean_over_rows(values: Array, counted: Array) -> Array:
    """[*B, T] -> [*B], the mean over the rows that count; 0 if no row counts."""
    total = jnp.sum(jnp.where(counted, values, 0), axis=-1)
    return total / jnp.maximum(jnp.sum(counted, axis=-1), 1).astype(values.dtype)


def _per_query(name: str, value: Any, kind: Any, described: str, weights: Array) -> Array:
    array = any_array(name, value)
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} must be {described}; got dtype {array.dtype}")
    *batch_shape, target_length, _ = weights.shape
    # `broadcasts` alone would accept a last axis of size 1.
    if array.shape[-1:] != (target_length,) or not broadcasts(array.shape[:-1], tuple(batch_shape)):
        axes = f", with batch axes that broadcast to {batch_shape}" if batch_shape else ""
        raise ValueError(f"{name} must be {[target_length]}{axes}; got {list(array.shape)}")
    check_batch_axes(name, array.shape, 1, tuple(batch_shape))
    return jnp.broadcast_to(array, weights.shape[:-1])
