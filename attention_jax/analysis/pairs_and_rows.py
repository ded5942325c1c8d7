"""What statistics of attention share: arguments that fit [*B, T, S], and which queries count."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.analysis.entropy_terms import is_zero
from attention_jax.core.arrays import accumulator_dtype, float_array
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
    # Unsigned numbers that are too large come out negative, out of range as before.
    return array.astype(jnp.int64 if array.dtype.itemsize == 8 else jnp.int32)


def only_rows(weights: Array, rows: Array) -> Array:
    """Makes a query that does not count one that attends to nothing, whatever its row held."""
    return jnp.where(rows[..., None], weights, 0)


def has_keys(weights: Array) -> Array:
    """Whether a query attends to anything: bool [*B, T]."""
    return ~jnp.all(is_zero(weights), axis=-1)


def mean_over_rows(values: Array, counted: Array) -> Array:
    """[*B, T] -> [*B], over the rows that are counted; 0 if none is."""
    total = jnp.sum(jnp.where(counted, values, 0), axis=-1)
    return total / jnp.maximum(jnp.sum(counted, axis=-1), 1).astype(values.dtype)


def _per_query(name: str, value: Any, kind: Any, described: str, weights: Array) -> Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array; got {type(value).__name__}") from error
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} must be {described}; got dtype {array.dtype}")
    *batch_shape, target_length, _ = weights.shape
    # `broadcasts` alone would let a last axis of size 1 pass.
    if array.shape[-1:] != (target_length,) or not broadcasts(array.shape[:-1], tuple(batch_shape)):
        axes = f", with batch axes that broadcast to {batch_shape}" if batch_shape else ""
        raise ValueError(f"{name} must be {[target_length]}{axes}; got {list(array.shape)}")
    check_batch_axes(name, array.shape, 1, tuple(batch_shape))
    return jnp.broadcast_to(array, weights.shape[:-1])
