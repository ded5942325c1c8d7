"""The base class of masks, their combinations by `&`, `|` and `~`, and masks stored as tables."""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import bool_array
from attention_jax.positions.position_functions import (
    Joined,
    PositionFunction,
    Shifted,
    Stored,
    check_decorated,
    pad_rank,
)
from attention_jax.positions.position_functions import part_field as submask_field
from attention_jax.positions.position_functions import position_dataclass as mask_dataclass

Array = jax.Array


class TileStatus(NamedTuple):
    """Whether a tile is known to be empty or full; both are False where this is unknown."""

    empty: Array  # bool []: no pair of the tile is allowed
    full: Array  # bool []: every pair of the tile is allowed


class Mask(PositionFunction):
    """Base of all masks: a boolean function of (query position, key position).

    A subclass, decorated with `mask_dataclass`, defines `allowed`; with `tile_status` it also skips
    empty tiles. Masks combine with `&`, `|` and `~`, with bool arrays [*B, T, S] too. Where a float
    array [*B] or [*B, T] of a mask is NaN, as that of a learned window that diverged, attention
    makes the rows NaN.

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

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return self.allowed(query_positions, key_positions)

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
class DenseMask(Stored, Mask):
    """A stored boolean table; axes T and S may have size 1."""

    allowed = Stored.at

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        tile = self.at(query_positions, key_positions)
        return TileStatus(empty=~tile.any(), full=tile.all())


@mask_dataclass
class AndMask(Joined, Mask):
    """Pairs that both masks allow."""

    allowed, join = Joined.at, staticmethod(jnp.logical_and)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        parts = self.left, self.right
        left, right = (part.tile_status(query_positions, key_positions) for part in parts)
        return TileStatus(empty=left.empty | right.empty, full=left.full & right.full)

    def most_keys(self) -> int:
        return min(self.left.most_keys(), self.right.most_keys())


@mask_dataclass
class OrMask(Joined, Mask):
    """Pairs that at least one of two masks allows."""

    allowed, join = Joined.at, staticmethod(jnp.logical_or)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        parts = self.left, self.right
        left, right = (part.tile_status(query_positions, key_positions) for part in parts)
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
class ShiftedMask(Shifted, Mask):
    """A mask of longer sequences, at the positions of `shifts`."""

    allowed = Shifted.at

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        return self.function.tile_status(*self.shifts.shifted(query_positions, key_positions))

    def most_keys(self) -> int:
        return self.function.most_keys()


def as_mask(mask: Mask | Array) -> Mask:
    """A `Mask` unchanged; a boolean array [*B, T, S] or [T, S] as a `DenseMask`."""
    if isinstance(mask, Mask):
        check_decorated(mask)
        return mask
    return DenseMask(pad_rank(bool_array("mask", mask, "may attend"), 2))
