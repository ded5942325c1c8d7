"""Which pairs may attend, as composable functions of position.

A mask is boolean and `True` means "may attend". A `Mask` never stores its [T, S] table: it answers
for the positions it is asked about, so that a tiled implementation asks tile by tile. Masks combine
with `&`, `|` and `~`, and are pytrees: options are static and compared by value, arrays are leaves
whose leading axes broadcast (aligned to the right, as NumPy does) to the batch axes `*B`.

A mask of your own is a class with one method:

    @mask_dataclass
    class Strided(Mask):
        stride: int
        def allowed(self, query_positions, key_positions):
            return (query_positions[:, None] - key_positions[None, :]) % self.stride == 0
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

_CORE_AXES = "core_axes"


def array_field(*core_axes: str) -> Any:
    """A mask's array leaf `[*B, *core_axes]`; each core axis is "T" or "S" (or of size 1)."""
    return dataclasses.field(metadata={_CORE_AXES: core_axes})


def submask_field() -> Any:
    """A mask's leaf that is itself a `Mask`."""
    return dataclasses.field(metadata={_CORE_AXES: None})


@dataclass_transform(frozen_default=True)
def mask_dataclass(cls):
    """Makes a class of annotated fields a frozen dataclass and a pytree.

    Fields made by `array_field` or `submask_field` are leaves; all others are static options.
    A mask without arrays is hashable by value and may be a static argument of `jax.jit`.
    """
    declared = [
        *getattr(cls, "__dataclass_fields__", {}).values(),  # inherited
        *(getattr(cls, name, None) for name in inspect.get_annotations(cls)),
    ]
    holds_arrays = any(
        isinstance(field, dataclasses.Field) and field.metadata.get(_CORE_AXES) is not None
        for field in declared
    )
    # Arrays have no truth value, so a mask that holds one is compared by identity.
    cls = dataclasses.dataclass(frozen=True, eq=not holds_arrays)(cls)
    leaves = [field.name for field in dataclasses.fields(cls) if _CORE_AXES in field.metadata]
    static = [field.name for field in dataclasses.fields(cls) if field.name not in leaves]
    return jax.tree_util.register_dataclass(cls, data_fields=leaves, meta_fields=static)


class Mask:
    """Base of all masks: a boolean function of (query position, key position)."""

    __array_ufunc__ = None  # so that `numpy_array & mask` comes to `__rand__`

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        """Whether query i may attend to key j.

        Args:
            query_positions: int [t], 0 <= i < T.
            key_positions: int [s], 0 <= j < S.

        Returns:
            bool, broadcastable to [..., t, s]; leading axes are those of the mask's own arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} must define allowed(query, key)")

    def materialize(self, target_length: int, source_length: int) -> Array:
        """The whole table, Bool[..., T, S].

        >>> causal_mask().materialize(2, 3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0]]
        """
        self.check(None, target_length, source_length)
        table = self.allowed(jnp.arange(target_length), jnp.arange(source_length))
        table = _pad_rank(table, 2)
        return jnp.broadcast_to(table, (*table.shape[:-2], target_length, source_length))

    def core_ndims(self) -> Mask:
        """This mask with every array replaced by its number of axes without batch axes."""
        return dataclasses.replace(  # type: ignore[type-var]
            self,
            **{
                name: value.core_ndims() if core_axes is None else len(core_axes)
                for name, value, core_axes in self._leaves()
                if value is not None
            },
        )

    def check(
        self, batch_shape: tuple[int, ...] | None, target_length: int, source_length: int
    ) -> None:
        """Raises ValueError unless every array fits inputs of shape [*B, T, D] and [*B, S, D].

        With `batch_shape=None`, any batch axes will do.
        """
        sizes = {"T": target_length, "S": source_length}
        for name, value, core_axes in self._leaves():
            if value is None:
                continue
            if core_axes is None:
                value.check(batch_shape, target_length, source_length)
                continue
            shape = np.shape(value)
            own = shape[: max(len(shape) - len(core_axes), 0)]
            core = [sizes[axis] for axis in core_axes]
            full = (*(own if batch_shape is None else batch_shape), *core)
            if len(shape) < len(core) or not broadcasts(shape, full):
                label = "mask" if isinstance(self, DenseMask) else f"mask {name}"
                raise ValueError(
                    f"{label} must broadcast to [{', '.join(map(str, full))}]"
                    f" ({', '.join(['*B', *core_axes])}); got {list(shape)}"
                )

    def _leaves(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if _CORE_AXES in field.metadata:
                yield field.name, getattr(self, field.name), field.metadata[_CORE_AXES]

    def __and__(self, other: Mask | Array) -> Mask:
        return AndMask(self, as_mask(other))

    def __or__(self, other: Mask | Array) -> Mask:
        return OrMask(self, as_mask(other))

    def __rand__(self, other: Array) -> Mask:
        return AndMask(as_mask(other), self)

    def __ror__(self, other: Array) -> Mask:
        return OrMask(as_mask(other), self)

    def __invert__(self) -> Mask:
        return NotMask(self)

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: combine masks with &, | and ~")


@mask_dataclass
class CausalMask(Mask):
    """Query i sees keys j <= i + offset."""

    offset: int

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        # The difference of two positions never overflows, as position + offset might.
        return key_positions[None, :] - query_positions[:, None] <= self.offset


@mask_dataclass
class LocalMask(Mask):
    """Query i sees keys i - left <= j <= i + right; `None` leaves that side open."""

    left: int | None
    right: int | None

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        distance = key_positions[None, :] - query_positions[:, None]
        near = jnp.ones_like(distance, dtype=bool)
        if self.left is not None:
            near &= distance >= -self.left
        if self.right is not None:
            near &= distance <= self.right
        return near


@mask_dataclass
class PaddingMask(Mask):
    """Only the first `key_lengths` keys exist, and only the first `query_lengths` queries."""

    key_lengths: Array = array_field()
    query_lengths: Array | None = array_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        real = _exist(key_positions[None, :], self.key_lengths)
        if self.query_lengths is not None:
            real_query = _exist(query_positions[:, None], self.query_lengths)
            real = jnp.logical_and(*_same_rank(real, real_query))
        return real


@mask_dataclass
class SegmentMask(Mask):
    """Query i sees key j when both carry the same segment number (packed sequences)."""

    query_segments: Array = array_field("T")
    key_segments: Array = array_field("S")

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        queries = _take(self.query_segments, query_positions, axis=-1)[..., :, None]
        keys = _take(self.key_segments, key_positions, axis=-1)[..., None, :]
        with jax.numpy_dtype_promotion("standard"):  # the two may be integers of different widths
            return jnp.equal(*_same_rank(queries, keys))


@mask_dataclass
class DenseMask(Mask):
    """A stored boolean table; axes T and S may have size 1."""

    table: Array = array_field("T", "S")

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        rows = _take(self.table, query_positions, axis=-2)
        return _take(rows, key_positions, axis=-1)

    def materialize(self, target_length: int, source_length: int) -> Array:
        self.check(None, target_length, source_length)
        shape = (*self.table.shape[:-2], target_length, source_length)
        return jnp.broadcast_to(self.table, shape)


@mask_dataclass
class AndMask(Mask):
    """Both may."""

    left: Mask = submask_field()
    right: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        left = self.left.allowed(query_positions, key_positions)
        right = self.right.allowed(query_positions, key_positions)
        return jnp.logical_and(*_same_rank(left, right))


@mask_dataclass
class OrMask(Mask):
    """Either may."""

    left: Mask = submask_field()
    right: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        left = self.left.allowed(query_positions, key_positions)
        right = self.right.allowed(query_positions, key_positions)
        return jnp.logical_or(*_same_rank(left, right))


@mask_dataclass
class NotMask(Mask):
    """The other pairs may."""

    mask: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return ~self.mask.allowed(query_positions, key_positions)


def causal_mask(offset: int = 0) -> Mask:
    """Query i sees keys j <= i + offset (aligned at the top left when T != S, as in `jax.nn`).

    Args:
        offset: how many keys beyond its own position a query may see; may be negative.

    Returns:
        a `Mask` without arrays: static, hashable, for any T and S.

    Raises:
        ValueError: `offset` is no Python integer of 32 bits.

    >>> causal_mask(offset=1).materialize(2, 4).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0]]
    """
    return CausalMask(_static_int("offset", offset))


def local_mask(left: int | None, right: int | None) -> Mask:
    """Query i sees keys i - left <= j <= i + right (a sliding window).

    Args:
        left: keys to the left of the query's position that it may see, >= 0; None for all.
        right: the same to the right.

    Returns:
        a `Mask` without arrays: static, hashable, for any T and S.

    Raises:
        ValueError: `left` or `right` is negative, or no Python integer of 32 bits.

    >>> local_mask(1, 0).materialize(3, 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    return LocalMask(_window("left", left), _window("right", right))


def padding_mask(key_lengths: Array, query_lengths: Array | None = None) -> Mask:
    """Keys from `key_lengths` on, and queries from `query_lengths` on, are padding.

    Args:
        key_lengths: int, axes that broadcast to *B: [B] for inputs [B, T, D], [B, 1] for
            inputs [B, N, T, D].
        query_lengths: the same for queries; None if every query is real.

    Returns:
        a `Mask` whose leaves are the lengths.

    Raises:
        ValueError: lengths are not integers.

    >>> padding_mask(jnp.array([1, 3])).materialize(1, 3).astype(int).tolist()
    [[[1, 0, 0]], [[1, 1, 1]]]
    """
    keys = _integers("key_lengths", key_lengths)
    queries = None if query_lengths is None else _integers("query_lengths", query_lengths)
    return PaddingMask(keys, queries)


def segment_mask(query_segments: Array, key_segments: Array) -> Mask:
    """Query i sees key j when their segment numbers are equal.

    Args:
        query_segments: int [*B, T].
        key_segments: int [*B, S].

    Returns:
        a `Mask` whose leaves are the segments.

    Raises:
        ValueError: segments are not integers, or have no position axis.

    >>> segment_mask(jnp.array([0, 1]), jnp.array([0, 0, 1])).materialize(2, 3).astype(int).tolist()
    [[1, 1, 0], [0, 0, 1]]
    """
    queries = _integers("query_segments", query_segments)
    keys = _integers("key_segments", key_segments)
    for name, segments in (("query_segments", queries), ("key_segments", keys)):
        if segments.ndim < 1:
            raise ValueError(f"{name} must have a position axis, [*B, length]; got a scalar")
    return SegmentMask(queries, keys)


def as_mask(mask: Mask | Array) -> Mask:
    """A `Mask` as it is; a boolean array broadcastable to [*B, T, S] as a `DenseMask`."""
    if isinstance(mask, Mask):
        return mask
    try:
        table = jnp.asarray(mask)
    except (TypeError, ValueError):
        raise ValueError(f"mask must be a Mask or a boolean array; got {mask!r}") from None
    if table.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean, True = may attend; got dtype {table.dtype}")
    return DenseMask(_pad_rank(table, 2))


def _static_int(name: str, value: int) -> int:
    try:
        integer = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a Python integer; got {value!r}") from None
    if abs(integer) >= 2**31:
        raise ValueError(f"{name} must be below 2**31 in size; got {integer}")
    return integer


def _window(name: str, size: int | None) -> int | None:
    if size is None:
        return None
    size = _static_int(name, size)
    if size < 0:
        raise ValueError(f"{name} must be at least 0, or None for no bound; got {size}")
    return size


def _integers(name: str, value: Array) -> Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an integer array; got {value!r}") from None
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers; got dtype {array.dtype}")
    return array


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `full`, and no larger."""
    aligned = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(size in (1, to) for size, to in aligned)


def _take(array: Array, positions: Array, axis: int) -> Array:
    """`array` at `positions`; an axis of size 1 stands for every position."""
    if array.shape[axis] == 1:
        return array
    return jnp.take(array, positions, axis=axis, mode="clip")


# Ranks are made equal by hand, so that nothing here depends on implicit rank promotion, which
# careful users turn off.


def _pad_rank(array: Array, ndim: int) -> Array:
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def _same_rank(left: Array, right: Array) -> tuple[Array, Array]:
    ndim = max(left.ndim, right.ndim)
    return _pad_rank(left, ndim), _pad_rank(right, ndim)


def _exist(positions: Array, lengths: Array) -> Array:
    """Whether positions, a row [1, s] or a column [t, 1], are below lengths [*B]."""
    return _pad_rank(positions, lengths.ndim + 2) < lengths[..., None, None].astype(positions.dtype)
