"""The base class of masks, their combinations by `&`, `|` and `~`, and masks stored as tables."""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.pairwise.position_functions import (
    PositionFunction,
    Shifts,
    array_field,
    check_decorated,
    pad_rank,
    same_rank,
    take,
)
from attention_jax.pairwise.position_functions import part_field as submask_field
from attention_jax.pairwise.position_functions import position_dataclass as mask_dataclass

Array = jax.Array


class TileStatus(NamedTuple):
    """Whether a tile is known to be empty or full; both are False where this is unknown."""

    empty: Array  # bool []: no pair of the tile is allowed
    full: Array  # bool []: every pair of the tile is allowed


class Mask(PositionFunction):
    """Base of all masks: a boolean function of (query position, key position).

    A subclass, decorated with `mask_dataclass`, defines `allowed`; with `tile_status` it also skips
    empty tiles. Masks combine with `&`, `|` and `~`, with bool arrays [*B, T, S] too.

    >>> from attention_jax import causal_mask
    >>> @mask_dataclass
    ... class Strided(Mask):
    ...     stride: int
    ...     def allowed(self, query_positions, key_positions):
    ...         return (query_positions[:, None] - key_positions[None, :]) % self.stride == 0
    >>> (Strided(2) & causal_mask()).materialize(3, 3).astype(int).tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """

    kind = "mask"
    # Otherwise, lengths [B] for inputs [B, N, T, D] would be read as one per head if B equals N.
    all_batch_axes = True
    __array_ufunc__ = None  # so that `numpy_array & mask` calls `__rand__`

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        """Whether query i may attend to key j.

        Args:
            query_positions: int [t], 0 <= i < T.
            key_positions: int [s], 0 <= j < S.

        Returns:
            bool, broadcastable to [..., t, s]; its leading axes are those of the mask's arrays.
            (`attention` calls it for one example, whose arrays have no batch axes.)
        """
        raise NotImplementedError(f"{type(self).__name__} must define allowed(query, key)")

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        """Whether a tile is empty, and can be skipped, or full, and needs no masking.

        (False, False) is always correct, and only costs time. It is called for one example: the
        mask's arrays have no batch axes.

        Args:
            query_positions: int [t], consecutive.
            key_positions: int [s], consecutive.
        """
        del query_positions, key_positions
        return TileStatus(empty=jnp.zeros((), bool), full=jnp.zeros((), bool))

    def most_keys(self) -> int:
        """An upper bound, from static options, of the keys per query; it determines tile sizes."""
        return sys.maxsize

    def materialize(self, target_length: int, source_length: int) -> Array:
        """The whole table, bool [..., T, S].

        Raises:
            ValueError: an array does not fit T, S or the batch axes of the mask's other arrays.

        >>> from attention_jax.pairwise.masks import causal_mask
        >>> causal_mask().materialize(2, 3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0]]
        """
        self.check(self._batch_shape(), target_length, source_length)
        table = self.allowed(jnp.arange(target_length), jnp.arange(source_length))
        table = pad_rank(table, 2)
        return jnp.broadcast_to(table, (*table.shape[:-2], target_length, source_length))

    def _batch_shape(self) -> tuple[int, ...]:
        """The batch axes of all arrays of the mask, broadcast together."""
        core_ndims = jax.tree.leaves(self.core_ndims())
        batch_shapes = [
            np.shape(leaf)[: max(np.ndim(leaf) - core_ndim, 0)]
            for leaf, core_ndim in zip(jax.tree.leaves(self), core_ndims, strict=True)
        ]
        rank = max(map(len, batch_shapes), default=0)
        full_shapes = [shape for shape in batch_shapes if len(shape) == rank]
        axes = zip(*full_shapes, strict=True)
        return tuple(next((size for size in sizes if size != 1), 1) for sizes in axes)

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

    def label(self, name: str) -> str:
        return "mask"

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
    """Base of `&` and `|`."""

    left: Mask = submask_field()
    right: Mask = submask_field()

    def _both(self, *positions: Array) -> tuple[Array, Array]:
        return same_rank(self.left.allowed(*positions), self.right.allowed(*positions))

    def _statuses(self, *positions: Array) -> tuple[TileStatus, TileStatus]:
        return self.left.tile_status(*positions), self.right.tile_status(*positions)


@mask_dataclass
class AndMask(_TwoMasks):
    """Pairs that both masks allow."""

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return jnp.logical_and(*self._both(query_positions, key_positions))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        left, right = self._statuses(query_positions, key_positions)
        return TileStatus(empty=left.empty | right.empty, full=left.full & right.full)

    def most_keys(self) -> int:
        return min(self.left.most_keys(), self.right.most_keys())


@mask_dataclass
class OrMask(_TwoMasks):
    """Pairs that at least one of two masks allows."""

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return jnp.logical_or(*self._both(query_positions, key_positions))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        left, right = self._statuses(query_positions, key_positions)
        return TileStatus(empty=left.empty & right.empty, full=left.full | right.full)


@mask_dataclass
class NotMask(Mask):
    """Pairs that another mask forbids."""

    mask: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return ~self.mask.allowed(query_positions, key_positions)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        status = self.mask.tile_status(query_positions, key_positions)
        return TileStatus(empty=status.full, full=status.empty)


@mask_dataclass
class ShiftedMask(Mask):
    """A mask of longer sequences, at the positions of `shifts`."""

    mask: Mask = submask_field()
    shifts: Shifts = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return self.mask.allowed(*self.shifts.shifted(query_positions, key_positions))

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        return self.mask.tile_status(*self.shifts.shifted(query_positions, key_positions))

    def most_keys(self) -> int:
        return self.mask.most_keys()

    def check(
        self, batch_shape: tuple[int, ...] | None, target_length: int, source_length: int
    ) -> None:
        """The arrays fit the longer sequences, and any T and S."""


def as_mask(mask: Mask | Array) -> Mask:
    """A `Mask` unchanged; a boolean array [*B, T, S] or [T, S] as a `DenseMask`."""
    if isinstance(mask, Mask):
        check_decorated(mask)
        return mask
    try:
        table = jnp.asarray(mask)
    except (TypeError, ValueError):
        described = repr(mask) if isinstance(mask, str) else type(mask).__name__
        raise ValueError(f"mask must be a Mask or a boolean array; got {described}") from None
    if table.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean, True = may attend; got dtype {table.dtype}")
    return DenseMask(pad_rank(table, 2))
