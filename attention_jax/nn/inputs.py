"""The tokens and lengths that a model is given: checked, as arrays.

A token is a number from 0 to V - 1. Values are checked where the host knows them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import any_array, integer_array
from attention_jax.core.checks import check_entries
from attention_jax.functional.checks import check_axes

Array = jax.Array


def checked_ids(name: str, ids: Any, shape: tuple[int | str, ...], size: int) -> Array:
    """Tokens of a vocabulary of this size as an int array; ValueError unless they are such."""
    ids = check_axes(name, integer_array(name, ids), shape, ())
    check_entries(name, ids, 0, size - 1)
    return ids


def checked_source(source: Any, source_lengths: Any, size: int) -> tuple[Array, Array]:
    """The source [B, S] and its lengths [B], S for None, as int arrays; ValueError for others."""
    source = checked_ids("source", source, ("B", "S"), size)
    if source_lengths is None:
        return source, jnp.sum(jnp.ones_like(source), axis=1)
    lengths = integer_array("source_lengths", source_lengths)
    check_axes("source_lengths", lengths, source.shape[:1], ())
    check_entries("source_lengths", lengths, 0, source.shape[1])
    return source, lengths


def checked_inputs(
    source: Any, source_lengths: Any, target_inputs: Any, size: int, has_encoder: bool
) -> tuple[Array, Array, Array]:
    """The source [B, S], its lengths [B], and the target: tokens [B, T] or vectors [B, T, V].

    Args:
        source, source_lengths, target_inputs: as in a call of `Model`.
        size: V.
        has_encoder: False for a "decoder", whose source may be None, and empty for vectors.

    Raises:
        ValueError: an argument has the wrong shape, dtype or range.
    """
    target = any_array("target_inputs", target_inputs)
    is_vectors = jnp.issubdtype(target.dtype, jnp.floating)
    if is_vectors:
        check_axes("target_inputs", target, ("B", "T", size), (), ", or int [B, T]")
    else:
        target = checked_ids("target_inputs", target, ("B", "T"), size)
    if source is None and not has_encoder:
        if source_lengths is not None:
            raise ValueError("source_lengths must be None without a source")
        source = target[:, :0, 0].astype(int) if is_vectors else target[:, :0]
    source, lengths = checked_source(source, source_lengths, size)
    if is_vectors and source.shape[1] > 0 and not has_encoder:
        raise ValueError("target_inputs must be integers after the source of a decoder; got floats")
    match = f" to match source {list(source.shape)}"
    check_axes("target_inputs", target, (source.shape[0], *target.shape[1:]), (), match)
    return source, lengths, target
