"""What a mask and a bias are: functions of positions, read as "may attend" and as numbers to add.

Masks combine with `&`, `|` and `~`, biases with `+`. What both share stands here once: a stored
table, two functions that are joined pair by pair, and a function of longer sequences whose
positions are shifted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import bool_array, float_array, pad_rank, same_rank
from attention_jax.positions.function import (
    PositionFunction,
    array_field,
    check_batch_axes,
    check_decorated,
    function_field,
    position_dataclass,
    take,
)

Array = jax.Array


class TileStatus(NamedTuple):
    """Whether a tile is known to be empty or full; both are False where this is unknown."""

    empty: Array  # bool []: no pair of the tile is allowed
    full: Array  # bool []: every pair of the tile is allowed


class Mask(PositionFunction):
    """Base of all masks: a boolean function of (query position, key position), True = may attend.

    A subclass, decorated with `mask_dataclass`, defines `allowed`. With `tile_status`, empty tiles
    are skipped and full tiles are not masked. Masks combine with `&`, `|` and `~`, with bool arrays
    [*B, T, S] too. Where a float array [*B] or [*B, T] of a mask is NaN, as that of a learned
    window that diverged, attention makes the rows NaN.

    >>> from attention_jax import causal_mask, mask_dataclass
    >>> @mask_dataclass
    ... class Strided(Mask):
    ...     stride: int
    ...     def allowed(self, query_positions, key_positions):
    ...         return (query_positions[:, None] - key_positions[None, :]) % self.stride == 0
    >>> (Strided(2) & causal_mask()).materialize(3, 3).astype(int).tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """

    kind, users_name = "mask", "allowed"
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
        return TileStatus(empty=jnp.zeros((), bool), full=jnp.zeros((), bool))

    def most_keys(self) -> int:
        """An upper bound, from static options, of the keys per query; it determines tile sizes."""
        return sys.maxsize

    def unknown_rows(self) -> Iterator[Array]:
        """Where a float array [*B] or [*B, T] is NaN: bool [*B, 1] or [*B, T], for each array."""
        for _, value, core_axes in self._leaves():
            if core_axes is None:
                yield from value.unknown_rows()
            elif core_axes in ((), ("T",)) and jnp.issubdtype(jnp.result_type(value), jnp.floating):
                yield jnp.isnan(value if core_axes else jnp.asarray(value)[..., None])

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


class Bias(PositionFunction):
    """Base of all biases: a float function of (query position, key position).

    A subclass, decorated with `bias_dataclass`, defines `values`. Its fields made by `array_field`
    are differentiable. Biases add: `alibi_bias(slopes) + bias`, with arrays [*B, T, S] too.

    >>> from attention_jax import bias_dataclass
    >>> @bias_dataclass
    ... class Late(Bias):
    ...     rate: Array = array_field()
    ...     def values(self, query_positions, key_positions):
    ...         return self.rate * key_positions[None, :].astype(float)
    >>> Late(jnp.array(0.5)).materialize(2, 3).tolist()
    [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]
    >>> float(jax.grad(lambda rate: Late(rate).materialize(2, 3).sum())(0.5))
    6.0
    """

    kind, users_name = "bias", "values"
    __array_ufunc__ = None  # so that `numpy_array + bias` calls `__radd__`

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        """The bias of the logit of query i and key j.

        Args:
            query_positions: int [t], i >= 0, consecutive; T or larger in a padded tile.
            key_positions: int [s], j >= 0, consecutive.

        Returns:
            float, broadcastable to [..., t, s]; its leading axes are those of the bias's arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} must define values(query, key)")

    def __add__(self, other: Bias | Array) -> Bias:
        return SumBias(self, as_bias(other))

    def __radd__(self, other: Array) -> Bias:
        return SumBias(as_bias(other), self)


@position_dataclass
class Stored(PositionFunction):
    """A stored table; axes T and S may have size 1."""

    table: Array = array_field("T", "S")

    def label(self, name: str) -> str:
        return self.kind

    def check(self, batch_shape: tuple[int, ...], target_length: int, source_length: int) -> None:
        super().check(batch_shape, target_length, source_length)
        # For inputs [B, N, T, D] with B = N, [B, T, S] would be read as a table for each head.
        axes = self.table.shape[:-2]
        fits_first = all(size in (1, to) for size, to in zip(axes, batch_shape, strict=False))
        if fits_first and any(size != 1 for size in axes):
            check_batch_axes(self.kind, self.table.shape, 2, batch_shape)

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return take(take(self.table, query_positions, axis=-2), key_positions, axis=-1)

    def _table(self, target_length: int, source_length: int) -> Array:
        return jnp.broadcast_to(self.table, (*self.table.shape[:-2], target_length, source_length))


@position_dataclass
class DenseMask(Stored, Mask):
    """A stored boolean table; axes T and S may have size 1."""

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        tile = self.at(query_positions, key_positions)
        return TileStatus(empty=~tile.any(), full=tile.all())


@position_dataclass
class DenseBias(Stored, Bias):
    """A stored table; axes T and S may have size 1."""


@position_dataclass
class Joined(PositionFunction):
    """Two functions, joined pair by pair."""

    join: ClassVar[Any]  # of two arrays
    left: Any = function_field()
    right: Any = function_field()

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        entries = (each.at(query_positions, key_positions) for each in (self.left, self.right))
        with jax.numpy_dtype_promotion("standard"):  # the two may be floats of different widths
            return self.join(*same_rank(*entries))


@position_dataclass
class AndMask(Joined, Mask):
    """Pairs that both masks allow."""

    join = staticmethod(jnp.logical_and)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        positions = query_positions, key_positions
        left, right = (each.tile_status(*positions) for each in (self.left, self.right))
        return TileStatus(empty=left.empty | right.empty, full=left.full & right.full)

    def most_keys(self) -> int:
        return min(self.left.most_keys(), self.right.most_keys())


@position_dataclass
class OrMask(Joined, Mask):
    """Pairs that at least one of two masks allows."""

    join = staticmethod(jnp.logical_or)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        positions = query_positions, key_positions
        left, right = (each.tile_status(*positions) for each in (self.left, self.right))
        return TileStatus(empty=left.empty & right.empty, full=left.full | right.full)


@position_dataclass
class NotMask(Mask):
    """Pairs that another mask forbids."""

    mask: Mask = function_field()

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return ~self.mask.at(query_positions, key_positions)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        status = self.mask.tile_status(query_positions, key_positions)
        return TileStatus(empty=status.full, full=status.empty)


@position_dataclass
class SumBias(Joined, Bias):
    """The sum of two biases."""

    join = staticmethod(jnp.add)


@position_dataclass
class Shifts(PositionFunction):
    """Positions in longer sequences, of a device's or a decoder's tokens.

    The tokens come in pieces of consecutive positions: position i of piece p = i // piece_length is
    i + shifts[p]. A tile must not contain tokens of two pieces.
    """

    queries: Array = array_field("pieces")  # int, the shifts of the queries
    keys: Array = array_field("pieces")  # int, the shifts of the keys
    # The number of queries and of keys in a piece; it has no effect on a single shift.
    piece_lengths: tuple[int, int] = (1, 1)

    def shifted(self, *positions: Array) -> tuple[Array, ...]:
        """Query and key positions in the longer sequences, int [t] and [s]."""
        sides = zip(positions, (self.queries, self.keys), self.piece_lengths, strict=True)
        return tuple(
            i + take(shifts.astype(i.dtype), i // length, axis=-1) for i, shifts, length in sides
        )


@position_dataclass
class Shifted(PositionFunction):
    """A function of longer sequences, at the positions of `shifts`."""

    function: Any = function_field()
    shifts: Shifts = function_field()

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return self.function.at(*self.shifts.shifted(query_positions, key_positions))

    def check(self, batch_shape: tuple[int, ...], target_length: int, source_length: int) -> None:
        """Checks nothing: the arrays fit the longer sequences, not T and S."""


@position_dataclass
class ShiftedMask(Shifted, Mask):
    """A mask of longer sequences, at the positions of `shifts`."""

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        return self.function.tile_status(*self.shifts.shifted(query_positions, key_positions))

    def unknown_rows(self) -> Iterator[Array]:
        """Yields nothing: the arrays have the rows of the longer sequences."""
        yield from ()

    def most_keys(self) -> int:
        return self.function.most_keys()


@position_dataclass
class ShiftedBias(Shifted, Bias):
    """A bias of longer sequences, at the positions of `shifts`."""


def members(function: Any, kind: type[Joined]) -> list[Any]:
    """The functions that `kind` joins, at any depth, from left to right; [] for None."""
    if isinstance(function, kind):
        return members(function.left, kind) + members(function.right, kind)
    return [] if function is None else [function]


def as_mask(mask: Mask | Array) -> Mask:
    """A `Mask` unchanged; a boolean array [*B, T, S] or [T, S] as a `DenseMask`."""
    if isinstance(mask, Mask):
        check_decorated(mask)
        return mask
    return DenseMask(pad_rank(bool_array("mask", mask, "may attend"), 2))


def as_bias(bias: Bias | Array) -> Bias:
    """A `Bias` unchanged; a float array broadcastable to [*B, T, S] as a `DenseBias`."""
    if isinstance(bias, Bias):
        check_decorated(bias)
        return bias
    return DenseBias(pad_rank(float_array("bias", bias), 2))
