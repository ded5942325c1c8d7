"""Conjunctions of causal, local, padding and segment masks, read as windows of consecutive keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.positions.contract import AndMask, Mask, members
from attention_jax.positions.masks import LocalMask, PaddingMask, SegmentMask, TracedLocalMask

Array = jax.Array

_ROWS_AT_ONCE = 128  # of a mask with segments, where it is read row by row


class Windows(NamedTuple):
    """Query i sees the keys first_i <= j < end_i, of its own segment if there are segments.

    The fields are arrays, or a kernel's references to them.
    """

    first: Any  # int32 [T]
    end: Any  # int32 [T]; first for a query without keys
    query_segments: Any = None  # int32 [T]
    key_segments: Any = None  # int32 [S]

    def allowed(self, key_positions: Array) -> Array:
        """Whether each query sees each key, for arrays that broadcast to the pairs of a tile."""
        allowed: Array = (self.first <= key_positions) & (key_positions < self.end)
        if self.query_segments is not None:
            allowed &= self.query_segments == self.key_segments
        return allowed

    def map(self, of_query: Callable[[Any], Any], of_key: Callable[[Any], Any]) -> "Windows":
        """A function of each array [T], and of each array [S]; None stays None."""
        first, end, query_segments = jax.tree.map(of_query, tuple(self[:3]))
        return Windows(first, end, query_segments, jax.tree.map(of_key, self.key_segments))


def reason_against_mask(mask: Mask | None, *, segments: bool = False) -> str | None:
    """Why the mask is not a window for each query, with at most one mask of segments; or None."""
    parts = members(mask, AndMask)
    served = LocalMask, PaddingMask, *[SegmentMask] * segments
    for part in parts:
        if not isinstance(part, served):
            return (
                "takes causal_mask(...), local_mask(...), padding_mask(...)"
                f"{', segment_mask(...)' * segments} and their conjunctions; got"
                f" {type(part).__name__}"
            )
    if sum(isinstance(part, SegmentMask) for part in parts) > 1:
        return "takes one segment_mask(...); got several"
    return None


class Bounds(NamedTuple):
    """The static part of a mask: query i sees at most the keys i - left <= j <= i + right."""

    left: int | None
    right: int | None
    padded: bool  # whether lengths of the example bound them too


def bounds_of(mask: Mask | None) -> Bounds:
    """The bounds of a mask that `reason_against_mask` has no objection to."""
    parts = members(mask, AndMask)
    local = [part for part in parts if type(part) is LocalMask]
    left = [part.left for part in local if part.left is not None]
    right = [part.right for part in local if part.right is not None]
    padded = any(isinstance(part, PaddingMask) for part in parts)
    return Bounds(min(left, default=None), min(right, default=None), padded)


def hides_tokens(mask: Mask | None, target_length: int, source_length: int) -> bool:
    """Whether some query may see no key, or some key be seen by no query."""
    left, right, padded = bounds_of(mask)
    varying = TracedLocalMask, SegmentMask
    if padded or any(isinstance(part, varying) for part in members(mask, AndMask)):
        return True
    shorter_by = target_length - source_length  # T - S
    hides_left = left is not None and left < max(shorter_by, 0)
    return hides_left or (right is not None and right < max(-shorter_by, 0))


def windows_of(mask: Mask | None, target_length: int, source_length: int) -> Windows:
    """The windows of a mask that `reason_against_mask` has no objection to."""
    positions = jnp.arange(target_length, dtype=jnp.int32)
    first = jnp.zeros_like(positions)
    end = jnp.full_like(positions, source_length)
    far = target_length + source_length  # a larger distance could overflow
    segments: list[Array] = []
    for part in members(mask, AndMask):
        if isinstance(part, LocalMask) and part.left is not None:
            first = jnp.maximum(first, positions - jnp.clip(part.left, -far, far))
        if isinstance(part, LocalMask) and part.right is not None:
            end = jnp.minimum(end, positions + jnp.clip(part.right, -far, far) + 1)
        if isinstance(part, SegmentMask):
            segments = [part.query_segments, part.key_segments]
        if isinstance(part, PaddingMask):
            end = jnp.minimum(end, jnp.minimum(part.key_lengths, source_length).astype(jnp.int32))
            if part.query_lengths is not None:
                end = jnp.where(positions < part.query_lengths.astype(jnp.int32), end, 0)
    end = jnp.maximum(end, 0)
    return Windows(jnp.minimum(first, end), end, *[ids.astype(jnp.int32) for ids in segments])


def seen_tokens(windows: Windows, source_length: int) -> tuple[Array, Array]:
    """Which queries see a key, bool [T], and which keys a query sees, bool [S]."""
    keys = jnp.arange(source_length, dtype=jnp.int32)
    if windows.query_segments is None:
        steps = jnp.zeros(source_length + 1, jnp.int32)
        steps = steps.at[windows.first].add(1).at[windows.end].add(-1)
        return windows.end > windows.first, jnp.cumsum(steps[:-1]) > 0

    def sees_any(query: tuple[Any, Any, Any]) -> Array:
        return Windows(*query, windows.key_segments).allowed(keys).any()

    def is_seen(key: tuple[Array, Array]) -> Array:
        position, segment = key
        return windows._replace(key_segments=segment).allowed(position).any()

    return (
        jax.lax.map(sees_any, windows[:3], batch_size=_ROWS_AT_ONCE),
        jax.lax.map(is_seen, (keys, windows.key_segments), batch_size=_ROWS_AT_ONCE),
    )
