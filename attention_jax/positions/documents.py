"""Packed documents: several in one row, each of which sees itself alone."""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import integer_array, pad_rank
from attention_jax.core.checks import check_entries, check_integer
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.core.serialization import exported
from attention_jax.positions.contract import Mask
from attention_jax.positions.masks import segment_mask

Array = jax.Array

_NO_QUERY, _NO_KEY = 2**31 - 1, 2**31 - 2  # after all documents, so that tiles of padding are empty


@exported
class Documents(NamedTuple):
    """The documents of packed rows, from `packed_documents` or `from_segments`."""

    segments: Array  # int [*B, T], the number of each token's document; negative for padding
    position_ids: Array  # int32 [*B, T], from 0 in each document; 0 for padding

    @classmethod
    def from_segments(cls, segments: Array) -> Self:
        """The documents with these numbers.

        Args:
            segments: int [*B, T]; a document is a run of equal numbers, from 0 to 2^31 - 3. Two
                runs with one number are two documents. Padding has negative numbers.

        Raises:
            ValueError: segments are not integers [*B, T]; outside of `jit`, one is too large.

        >>> Documents.from_segments(jnp.array([7, 7, 2, 2, 2, -1])).position_ids.tolist()
        [0, 1, 0, 1, 2, 0]
        """
        segments = _rows("segments", segments, "T")
        check_entries("segments", segments, -(2**31), _NO_KEY - 1)
        return cls(segments, jnp.where(segments < 0, 0, _runs(segments)[1]))

    @property
    def positions_from_end(self) -> Array:
        """The number of tokens after each token in its document, int32 [*B, T]; 0 for padding."""
        reverse = functools.partial(jnp.flip, axis=-1)
        positions = reverse(_runs(reverse(self.segments))[1])
        return jnp.where(self.segments < 0, 0, positions)

    def mask(self, keys: Self | None = None) -> Mask:
        """Query i sees key j when they are of the same document; padding sees and is seen by none.

        Args:
            keys: the documents of another sequence: a document sees those that have its number.
                None for self attention: a document sees itself alone.

        Returns:
            a `Mask`; memory is linear in T and S.

        >>> documents = packed_documents(4, lengths=jnp.array([2, 1]))
        >>> documents.mask().materialize(4, 4).astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
        """

        def numbers(documents: Self, padding: int) -> Array:
            segments = documents.segments
            own = _runs(segments)[0] if keys is None else segments
            return jnp.where(segments < 0, padding, own)

        seen = self if keys is None else keys
        return segment_mask(numbers(self, _NO_QUERY), numbers(seen, _NO_KEY))


def packed_documents(
    size: int, *, lengths: Array | None = None, cu_seqlens: Array | None = None
) -> Documents:
    """The documents of rows of `size` tokens, in which they stand one after another.

    Works under `jit`: the lengths may be traced. A row may hold fewer documents than its lengths
    have entries, because a document may be empty; the tokens after the last one are padding. Under
    `jit`, where the values are not known, a row with a wrong length or sum is padding as a whole.

    Args:
        size: T, tokens of a row, padding included.
        lengths: int [*B, D], tokens of each document; or None.
        cu_seqlens: int [*B, D + 1], the sums of the lengths before each document and at the end,
            0, n_1, n_1 + n_2, ...; or None. It may repeat its last entry; 0 or -1 behind it are
            wrong sums.

    Returns:
        `Documents`; their `mask()` and `position_ids` are for attention.

    Raises:
        ValueError: neither or both are given, or they are not integers; outside of `jit`, a length
            is negative, `cu_seqlens` does not begin with 0, or a row has more than `size` tokens.

    >>> documents = packed_documents(6, cu_seqlens=jnp.array([0, 2, 5]))
    >>> documents.segments.tolist(), documents.position_ids.tolist()
    ([0, 0, 1, 1, 1, -1], [0, 1, 0, 1, 2, 0])
    """
    check_integer("size", size, 0)
    if (lengths is None) == (cu_seqlens is None):
        got = "neither" if lengths is None else "both"
        raise ValueError(f"lengths or cu_seqlens must be given, one of the two; got {got}")
    if lengths is not None:
        lengths = _rows("lengths", lengths, "D")
        check_entries("lengths", lengths, 0, size)
        total, ends = "the sum of lengths", jnp.cumsum(lengths, axis=-1)
        sums = jnp.pad(ends, [(0, 0)] * (ends.ndim - 1) + [(1, 0)])
    else:
        total, sums = "cu_seqlens[..., -1]", _rows("cu_seqlens", cu_seqlens, "D + 1")
        check_entries("cu_seqlens[..., 0]", sums[..., :1], 0, 0)
        check_entries("the differences of cu_seqlens", jnp.diff(sums), 0, size)
    check_entries(total, sums[..., -1:], 0, size)

    def segments_of(sums: Array) -> Array:
        index = pad_rank(jnp.arange(size, dtype=sums.dtype), sums.ndim)
        begun: Any = functools.partial(jnp.searchsorted, side="right")
        number = jnp.vectorize(begun, signature="(d),(t)->(t)")(sums, index).astype(jnp.int32) - 1
        is_valid = jnp.all(sums[..., 1:] >= sums[..., :-1], axis=-1, keepdims=True)
        is_valid &= (sums[..., :1] == 0) & (sums[..., -1:] <= size)
        return jnp.where(is_valid & (number < sums.shape[-1] - 1), number, -1)

    return Documents.from_segments(on_automatic_axes(segments_of, explicit_spec(sums), sums))


def _rows(name: str, array: Any, axis: str) -> Array:
    array = integer_array(name, array)
    if not array.ndim or (axis == "D + 1" and not array.shape[-1]):
        raise ValueError(f"{name} must be [*B, {axis}]; got {list(array.shape)}")
    return array


def _runs(segments: Array) -> tuple[Array, Array]:
    """The index of the first token of each token's run of equal numbers, and the position in it.

    Both are int32 [*B, T].
    """

    def runs_of(segments: Array) -> tuple[Array, Array]:
        axis = segments.ndim - 1
        index = jax.lax.broadcasted_iota(jnp.int32, segments.shape, axis)
        is_first = (index == 0) | (segments != jnp.roll(segments, 1, axis=-1))
        first = jax.lax.cummax(jnp.where(is_first, index, 0), axis=axis)
        return first, index - first

    return on_automatic_axes(runs_of, explicit_spec(segments), segments)
