"""The tokens and lengths that a model is given: checked, as arrays.

A token is a number from 0 to V - 1. Values are checked where the host knows them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import any_array, integer_array
from attention_jax.core.checks import check_entries
from attention_jax.functional.checks import check_axes
from attention_jax.nn.config import ModelConfig
from attention_jax.positions.documents import Documents

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


class PackedInputs(NamedTuple):
    """The documents that share the rows of source and target."""

    source: Documents | None  # None in a "decoder"
    target: Documents


def checked_inputs(
    source: Any,
    source_lengths: Any,
    target_inputs: Any,
    segments: Any,
    size: int,
    config: ModelConfig,
) -> tuple[Array, Array, Array, PackedInputs | None]:
    """The source [B, S], its lengths [B], the target (tokens [B, T] or vectors [B, T, V]), and
    their documents.

    Args:
        source, source_lengths, target_inputs, segments: as in a call of `Model`.
        size: V.
        config: of the model. The source of a "decoder" may be None, and is empty for vectors.

    Raises:
        ValueError: an argument has the wrong shape, dtype or range.
    """
    has_encoder = config.architecture == "encoder-decoder"
    target = any_array("target_inputs", target_inputs)
    is_vectors = jnp.issubdtype(target.dtype, jnp.floating)
    if is_vectors:
        check_axes("target_inputs", target, ("B", "T", size), (), ", or int [B, T]")
    else:
        target = checked_ids("target_inputs", target, ("B", "T"), size)
    if segments is not None and source_lengths is not None:
        raise ValueError("source_lengths must be None with segments, which mark padding")
    if source is None and not has_encoder:
        if source_lengths is not None:
            raise ValueError("source_lengths must be None without a source")
        source = target[:, :0, 0].astype(int) if is_vectors else target[:, :0]
    source, lengths = checked_source(source, source_lengths, size)
    if is_vectors and source.shape[1] > 0 and not has_encoder:
        raise ValueError("target_inputs must be integers after the source of a decoder; got floats")
    match = f" to match source {list(source.shape)}"
    check_axes("target_inputs", target, (source.shape[0], *target.shape[1:]), (), match)
    if segments is None:
        return source, lengths, target, None
    return source, lengths, target, _checked_documents(segments, source, target, config)


def _checked_documents(
    segments: Any, source: Array, target: Array, config: ModelConfig
) -> PackedInputs:
    def of_side(side: str, segments: Any, tokens: Array) -> Documents:
        numbers = segments.segments if isinstance(segments, Documents) else segments
        name = f"segments of the {side}"
        match = f" to match tokens {list(tokens.shape[:2])}"
        numbers = check_axes(name, integer_array(name, numbers), tokens.shape[:2], (), match)
        return Documents.from_segments(numbers)

    if config.architecture == "decoder":
        if source.shape[1]:
            raise ValueError("source must be None with the segments of a decoder; got tokens")
        return PackedInputs(None, of_side("target", segments, target))
    if config.attention not in ("global", "coverage"):
        raise ValueError(
            f"segments must be None with attention {config.attention!r}, whose queries move along"
            f" the whole source; got {type(segments).__name__}"
        )
    is_pair = isinstance(segments, tuple | list) and len(segments) == 2
    if isinstance(segments, Documents) or not is_pair:
        raise ValueError(
            "segments must be a pair, those of the source and those of the target; got"
            f" {type(segments).__name__}"
        )
    return PackedInputs(
        of_side("source", segments[0], source), of_side("target", segments[1], target)
    )
