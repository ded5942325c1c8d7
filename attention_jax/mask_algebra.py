"""What a mask is, and how masks combine: `&`, `|`, `~`, and stored tables among them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple, dataclass_transform

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


class TileStatus(NamedTuple):
    """What is known of a tile of pairs without looking at each; False, False: nothing."""

    empty: Array  # bool []: no pair of the tile is allowed
    full: Array  # bool []: every pair of the tile is


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

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        """What is known of a tile: an empty one is skipped, a full one not masked.

        Answering "nothing" is always right and costs time only. Asked of one example: the mask's
        arrays have no batch axes.

        Args:
            query_positions: int [t], consecutive.
            key_positions: int [s], consecutive.
        """
        del query_positions, key_positions
        return TileStatus(empty=jnp.zeros((), bool), full=jnp.zeros((), bool))

    def materialize(self, target_length: int, source_length: int) -> Array:
        """The whole table, Bool[..., T, S].

        >>> from attention_jax.masks import causal_mask
        >>> causal_mask().materialize(2, 3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0]]
        """
        self.check(None, target_length, source_length)
        table = self.allowed(jnp.arange(target_length), jnp.arange(source_length))
        table = pad_rank(table, 2)
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
class DenseMask(Mask):
    """A stored boolean table; axes T and S may have size 1."""

    table: Array = array_field("T", "S")

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        rows = take(self.table, query_positions, axis=-2)
        return take(rows, key_positions, axis=-1)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        tile = self.allowed(query_positions, key_positions)
        return TileStatus(empty=~tile.any(), full=tile.all())

    def materialize(self, target_length: int, source_length: int) -> Array:
        self.check(None, target_length, source_length)
        shape = (*self.table.shape[:-2], target_length, source_length)
        return jnp.broadcast_to(self.table, shape)


@mask_dataclass
class _TwoMasks(Mask):
    """What `&` and `|` share."""

    left: Mask = submask_field()
    right: Mask = submask_field()

    def _both(self, *positions: Array) -> tuple[Array, Array]:
        return same_rank(self.left.allowed(*positions), self.right.allowed(*positions))

    def _statuses(self, *positions: Array) -> tuple[TileStatus, TileStatus]:
        return self.left.tile_status(*positions), self.right.tile_status(*positions)


@mask_dataclass
class AndMask(_TwoMasks):
    """Both may."""

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return jnp.logical_and(*self._both(query_positions, key_positions))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        left, right = self._statuses(query_positions, key_positions)
        return TileStatus(empty=left.empty | right.empty, full=left.full & right.full)


@mask_dataclass
class OrMask(_TwoMasks):
    """Either may."""

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return jnp.logical_or(*self._both(query_positions, key_positions))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        left, right = self._statuses(query_positions, key_positions)
        return TileStatus(empty=left.empty & right.empty, full=left.full | right.full)


@mask_dataclass
class NotMask(Mask):
    """The other pairs may."""

    mask: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return ~self.mask.allowed(query_positions, key_positions)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        status = self.mask.tile_status(query_positions, key_positions)
        return TileStatus(empty=status.full, full=status.empty)


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
    return DenseMask(pad_rank(table, 2))


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `full`, and no larger."""
    aligned = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(size in (1, to) for size, to in aligned)


def take(array: Array, positions: Array, axis: int) -> Array:
    """`array` at `positions`; an axis of size 1 stands for every position."""
    if array.shape[axis] == 1:
        return array
    return jnp.take(array, positions, axis=axis, mode="clip")


# Ranks are made equal by hand, so that nothing here depends on implicit rank promotion, which
# careful users turn off.


def pad_rank(array: Array, ndim: int) -> Array:
    """`array` with axes of size 1 in front, `ndim` axes in all."""
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def same_rank(left: Array, right: Array) -> tuple[Array, Array]:
    """Both with as many axes as the one that has more."""
    ndim = max(left.ndim, right.ndim)
    return pad_rank(left, ndim), pad_rank(right, ndim)
