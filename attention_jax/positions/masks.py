"""The masks of the library: causal and local, of padding, and of segments.

An array of a mask has all batch axes `*B` in front (of size 1 where it is shared), or no batch
axes. For inputs [B, N, T, D], lengths [B] are an error, because they are ambiguous: they could mean
[B, 1] or [1, N]. For a mask of your own see `Mask`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import bool_array, integer_array, same_rank
from attention_jax.core.checks import check_entries, check_integer
from attention_jax.positions.contract import Mask, TileStatus
from attention_jax.positions.function import array_field, position_dataclass, take

Array = jax.Array

_MAX_INT32 = 2**31 - 1  # positions are int32


@position_dataclass
class LocalMask(Mask):
    """Query i sees keys i - left <= j <= i + right; `None` means no bound on that side."""

    left: int | None
    right: int | None

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        # The difference of two positions never overflows; position + right could.
        distances = key_positions[None, :] - query_positions[:, None]
        return self._within(distances, distances)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        smallest = key_positions[0] - query_positions[-1]
        largest = key_positions[-1] - query_positions[0]
        return TileStatus(
            empty=~self._within(largest, smallest), full=self._within(smallest, largest)
        )

    def _within(self, lower: Array, upper: Array) -> Array:
        """Whether -left <= lower and upper <= right, for distances j - i."""
        return jnp.logical_and(
            self.left is None or lower >= -self.left, self.right is None or upper <= self.right
        )

    def most_keys(self) -> int:
        if self.left is None or self.right is None:
            return super().most_keys()
        return self.left + self.right + 1


@position_dataclass
class TracedLocalMask(LocalMask):
    """A `LocalMask` whose bounds are int32 arrays, or None: they may differ between examples."""

    left: Array | None = array_field()  # type: ignore[assignment]
    right: Array | None = array_field()  # type: ignore[assignment]

    def _within(self, lower: Array, upper: Array) -> Array:
        def at_most(distances: Array, bound: Array | None) -> Array:
            if bound is None:
                return jnp.ones(distances.shape, bool)
            ends = bound.astype(distances.dtype)[(..., *[None] * distances.ndim)]
            return jnp.less_equal(*same_rank(distances, ends))

        return jnp.logical_and(*same_rank(at_most(-lower, self.left), at_most(upper, self.right)))

    def label(self, name: str) -> str:
        return super().label(name) + " or offset" * (self.left is None)

    most_keys = Mask.most_keys  # not known before the program runs


class _ExistingTokens(Mask):
    """Base of masks in which all queries that exist see all keys that exist."""

    def existing(self, query_positions: Array, key_positions: Array) -> tuple[Array, Array]:
        """Which queries and which keys exist, bool [..., t] and [..., s]."""
        raise NotImplementedError

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        queries, keys = self.existing(query_positions, key_positions)
        return jnp.logical_and(*same_rank(queries[..., :, None], keys[..., None, :]))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        queries, keys = self.existing(query_positions, key_positions)
        return TileStatus(empty=~(queries.any() & keys.any()), full=queries.all() & keys.all())


@position_dataclass
class PaddingMask(_ExistingTokens):
    """Only the first `key_lengths` keys exist, and only the first `query_lengths` queries."""

    key_lengths: Array = array_field()
    query_lengths: Array | None = array_field()

    def check(self, batch_shape: tuple[int, ...], target_length: int, source_length: int) -> None:
        super().check(batch_shape, target_length, source_length)
        check_entries(self.label("key_lengths"), self.key_lengths, 0, source_length)
        if self.query_lengths is not None:
            check_entries(self.label("query_lengths"), self.query_lengths, 0, target_length)

    def existing(self, query_positions: Array, key_positions: Array) -> tuple[Array, Array]:
        def below(positions: Array, lengths: Array | None) -> Array:
            if lengths is None:
                return jnp.ones(positions.shape, bool)
            ends = lengths[..., None].astype(positions.dtype)
            return jnp.less(*same_rank(positions, ends))

        return below(query_positions, self.query_lengths), below(key_positions, self.key_lengths)


@position_dataclass
class TokenMask(_ExistingTokens):
    """Only the keys marked in `key_tokens` exist, and only the queries marked in `query_tokens`."""

    key_tokens: Array = array_field("S")
    query_tokens: Array | None = array_field("T")

    def existing(self, query_positions: Array, key_positions: Array) -> tuple[Array, Array]:
        keys = take(self.key_tokens, key_positions, axis=-1)
        if self.query_tokens is None:
            return jnp.ones(query_positions.shape, bool), keys
        return take(self.query_tokens, query_positions, axis=-1), keys


@position_dataclass
class SegmentMask(Mask):
    """Query i sees key j when both carry the same segment number (packed sequences)."""

    query_segments: Array = array_field("T")
    key_segments: Array = array_field("S")

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        queries = take(self.query_segments, query_positions, axis=-1)[..., :, None]
        keys = take(self.key_segments, key_positions, axis=-1)[..., None, :]
        with jax.numpy_dtype_promotion("standard"):  # the two may be integers of different widths
            return jnp.equal(*same_rank(queries, keys))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        queries = take(self.query_segments, query_positions, axis=-1)
        keys = take(self.key_segments, key_positions, axis=-1)
        with jax.numpy_dtype_promotion("standard"):
            disjoint = (queries.max() < keys.min()) | (keys.max() < queries.min())
            all_equal = (queries.min() == keys.max()) & (queries.max() == keys.min())
        return TileStatus(empty=disjoint, full=all_equal)


def causal_mask(offset: int | Array = 0) -> Mask:
    """Query i sees keys j <= i + offset (aligned at the top left when T != S, as in `jax.nn`).

    Args:
        offset: number of keys after its own position that a query may see; may be negative. An
            integer, or an int array: [], such as the traced length of a cache, or [*B], one for
            each example, size 1 where shared ([B, 1] for inputs [B, N, T, D]).

    Returns:
        a `Mask`; without arrays for an integer: static, hashable, for any T and S.

    Raises:
        ValueError: `offset` is not an integer below 2^31 in size, or an int array.

    >>> causal_mask(offset=1).materialize(2, 4).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0]]
    >>> causal_mask(jnp.array([0, 2])).materialize(1, 3).astype(int).tolist()
    [[[1, 0, 0]], [[1, 1, 1]]]
    """
    return _local_mask(None, _bound("offset", offset, -_MAX_INT32))


def local_mask(left: int | Array | None, right: int | Array | None) -> Mask:
    """Query i sees keys i - left <= j <= i + right (a sliding window).

    Args:
        left: number of keys before the query's position that it may see; None for all. An integer
            >= 0, or an int array as the `offset` of `causal_mask`, which may be negative: a query
            at position n of a cache sees D earlier keys by `local_mask(D - n, n)`.
        right: number of keys after the query's position that it may see, likewise.

    Returns:
        a `Mask`; without arrays for integers: static, hashable, for any T and S.

    Raises:
        ValueError: `left` or `right` is not an integer with 0 <= value < 2^31, or an int array.

    >>> local_mask(1, 0).materialize(3, 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    return _local_mask(_bound("left", left, 0), _bound("right", right, 0))


def padding_mask(key_lengths: Array, query_lengths: Array | None = None) -> Mask:
    """Masks padding: keys from position `key_lengths` on, and queries from `query_lengths` on.

    Args:
        key_lengths: int [*B], size 1 where shared: [B] for inputs [B, T, D], [B, 1] for inputs
            [B, N, T, D] (`lengths[:, None]`); or [], the same length for all. From 0 to S, which
            is checked where the values are known on the host: not under `jit`.
        query_lengths: int [*B] like `key_lengths`, for the queries; None if no query is padding.

    Returns:
        a `Mask` whose leaves are the lengths. For padding that is not at the end, see `token_mask`.

    Raises:
        ValueError: lengths are not integers.

    >>> padding_mask(jnp.array([1, 3])).materialize(1, 3).astype(int).tolist()
    [[[1, 0, 0]], [[1, 1, 1]]]
    """
    keys = integer_array("key_lengths", key_lengths)
    queries = None if query_lengths is None else integer_array("query_lengths", query_lengths)
    return PaddingMask(keys, queries)


def token_mask(key_tokens: Array, query_tokens: Array | None = None) -> Mask:
    """Masks padding at any position: only tokens that are marked `True` are real.

        allowed_ij = query_tokens_i and key_tokens_j

    In self attention, `token_mask(real, real)` also masks padded queries: their output is 0.

    Args:
        key_tokens: bool [*B, S], True = a real token, size 1 where shared: [B, S] for inputs
            [B, S, D], [B, 1, S] for inputs [B, N, S, D] (`real[:, None]`); or [S].
        query_tokens: bool [*B, T], the same for queries; None if there is no padding among the
            queries.

    Returns:
        a `Mask` whose leaves are the two arrays; memory is linear in T and S.

    Raises:
        ValueError: the tokens are not boolean.

    >>> tokens = jnp.array([5, 0, 8])  # 0 is padding
    >>> token_mask(tokens != 0, tokens != 0).materialize(3, 3).astype(int).tolist()
    [[1, 0, 1], [0, 0, 0], [1, 0, 1]]
    """
    real = "a real token (of token ids, write ids != padding_id)"
    keys = bool_array("key_tokens", key_tokens, real)
    queries = None if query_tokens is None else bool_array("query_tokens", query_tokens, real)
    return TokenMask(keys, queries)


def segment_mask(query_segments: Array, key_segments: Array) -> Mask:
    """Query i sees key j when their segment numbers are equal.

    Args:
        query_segments: int [*B, T], or [T] for all examples; [B, 1, T] for inputs [B, N, T, D].
        key_segments: int [*B, S], or [S].

    Returns:
        a `Mask` whose leaves are the segments.

    Raises:
        ValueError: segments are not integers.

    >>> segment_mask(jnp.array([0, 1]), jnp.array([0, 0, 1])).materialize(2, 3).astype(int).tolist()
    [[1, 1, 0], [0, 0, 1]]
    """
    queries = integer_array("query_segments", query_segments)
    return SegmentMask(queries, integer_array("key_segments", key_segments))


def _bound(name: str, bound: Any, least: int) -> int | Array | None:
    """An int of at least `least`, an int32 array or None; ValueError for something else."""
    if bound is None and least == 0:
        return None
    if not isinstance(bound, jax.Array | np.ndarray):
        return check_integer(name, bound, least, _MAX_INT32)
    return jnp.clip(integer_array(name, bound), -_MAX_INT32, _MAX_INT32).astype(jnp.int32)


def _local_mask(left: Any, right: Any) -> Mask:
    """A mask without arrays if both bounds are integers or None."""
    bounds = left, right
    if not any(isinstance(bound, jax.Array) for bound in bounds):
        return LocalMask(left, right)
    return TracedLocalMask(*[None if bound is None else jnp.asarray(bound) for bound in bounds])
