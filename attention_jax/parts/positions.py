"""`known_positions`: masks and biases of a user, traced, checked, and known by their programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import broadcasts
from attention_jax.core.names import is_of_this_package
from attention_jax.parts.programs import Part, Program, is_array, is_wide
from attention_jax.parts.samples import on_numbers
from attention_jax.positions.contract import Bias, Mask, TileStatus
from attention_jax.positions.function import PositionFunction, function_field, position_dataclass

Array = jax.Array

_TRACED_SIZES = (3, 5)  # the queries and keys of the traced tile


@position_dataclass
class _KnownPart(PositionFunction):
    """A user's mask or bias with its program, a static option: a new one recompiles.

    Its methods raise ValueError unless the program is still that of the call.
    """

    program: Program
    part: Any = function_field()

    def on_tile(self, *positions: Array) -> Any:
        """The part, for a tile of these positions."""
        part = self.part
        queries, keys = (each.shape[0] for each in positions)
        trace = functools.partial(_digest, part)
        self.program.check(f"{part.kind} {type(part).__name__}", trace, (queries, keys))
        return part

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return self.on_tile(query_positions, key_positions).at(query_positions, key_positions)


@position_dataclass
class KnownMask(_KnownPart, Mask):
    """A user's mask with its digest."""

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        positions = query_positions, key_positions
        return self.on_tile(*positions).tile_status(*positions)

    def most_keys(self) -> int:
        return self.part.most_keys()


@position_dataclass
class KnownBias(_KnownPart, Bias):
    """A user's bias with its digest."""


def known_positions(function: Any, lengths: tuple[int, int], dtype: Any) -> Any:
    """A mask or bias in which each part that a user wrote is traced and known by its program.

    The `tile_status` of a mask that was not seen before with these lengths is compared with its
    `allowed` on small tiles of the call, unless an array of the mask is traced.

    Args:
        function: a `Mask` or `Bias` that has been checked. Its arrays may have batch axes.
        lengths: T and S.
        dtype: float32 or float64, in which attention computes.

    Raises:
        ValueError: `allowed` or `values` fails or does not return an array of the right kind,
            the part uses a traced array that is no field, or a `tile_status` is wrong.
    """

    def is_users(part: Any) -> bool:
        return isinstance(part, PositionFunction) and not is_of_this_package(type(part))

    def known(function: Any) -> Any:
        if not is_users(function):
            return function
        part = _named_part(function)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(function))

        def check(digest: str) -> None:
            if _has_status(function) and not is_traced:
                seen = f"{digest} {lengths}"  # a longer call has tiles that a shorter one has not
                part.check_once(seen, lambda: _check_status(part, function, lengths))

        trace = functools.partial(_digest, function, dtype=dtype)
        program = part.program(trace, _TRACED_SIZES, lengths, check)
        return (KnownMask if isinstance(function, Mask) else KnownBias)(program, function)

    def is_whole(part: Any) -> bool:
        return is_users(part) or isinstance(part, _KnownPart)

    return jax.tree.map(known, function, is_leaf=is_whole)


def _named_part(function: PositionFunction) -> Part:
    return Part(function.kind, type(function).__name__, "make it a field made by array_field()")


def _has_status(function: PositionFunction) -> bool:
    return isinstance(function, Mask) and type(function).tile_status is not Mask.tile_status


def _digest(function: PositionFunction, size: Any, dtype: Any = jnp.float16) -> str:
    """Traces the methods of a user's mask or bias on a tile, and checks their results."""
    part = _named_part(function)
    part.check_signatures(function)
    is_mask = isinstance(function, Mask)
    name, kind = ("allowed", jnp.bool_) if is_mask else ("values", jnp.floating)
    values = "booleans" if is_mask else f"floats of {jnp.dtype(dtype)} or more"
    contract = (
        f"{name} must return {values} that broadcast to {list(size)} of"
        f" {size[0]} queries, {size[1]} keys"
    )

    def without_batch(leaf: Any, ndim: int) -> jax.ShapeDtypeStruct:
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.result_type(float)  # its arrays are cast before tiles read them
        return jax.ShapeDtypeStruct(jnp.shape(leaf)[jnp.ndim(leaf) - ndim :], dtype)

    def program(function: Any, *positions: Array) -> Any:
        entries = part.call(name, getattr(function, name), *positions, of=positions, cure=contract)
        fits = is_array(entries, kind) and broadcasts(entries.shape, size)
        part.require(fits and is_wide(entries, dtype), contract, entries)
        if not _has_status(function):
            return entries
        return entries, part.call("tile_status", function.tile_status, *positions, of=positions)

    example = jax.tree.map(without_batch, function, function.core_ndims())
    positions = [jax.ShapeDtypeStruct((length,), jnp.arange(0).dtype) for length in size]
    return part.trace(program, example, *positions)


def _check_status(part: Part, mask: Mask, lengths: tuple[int, int]) -> None:
    """Raises ValueError if a tile of the first example is not as `tile_status` says."""
    if 0 in lengths or any(np.size(leaf) == 0 for leaf in jax.tree.leaves(mask)):
        return
    example = jax.tree.map(
        lambda leaf, ndim: np.asarray(leaf)[(0,) * (np.ndim(leaf) - ndim)], mask, mask.core_ndims()
    )
    for at_most in ((2, 3), (8, 5)):
        sizes = [*map(min, at_most, lengths)]
        last = np.subtract(lengths, sizes)
        starts = [np.unique([*range(min(n, 24)), *np.linspace(0, n, 9).astype(int)]) for n in last]
        tiles = np.stack(np.meshgrid(*starts), -1).reshape(-1, 2)

        def contents(mask: Any, tile: Array, sizes: Any = sizes) -> Any:
            positions = [start + jnp.arange(size) for start, size in zip(tile, sizes, strict=True)]
            allowed = jnp.broadcast_to(mask.at(*positions), sizes)
            return TileStatus(~allowed.any(), allowed.all()), mask.tile_status(*positions)

        actual, status = on_numbers(jax.vmap(contents, (None, 0)), example, tiles)
        for name, is_so, claimed in zip(TileStatus._fields, actual, status, strict=True):
            wrong = tiles[claimed & ~is_so]
            (i, j), (t, s) = wrong[0] if len(wrong) else (0, 0), sizes
            part.require(
                not len(wrong),
                "tile_status must agree with allowed; it calls the tile of queries"
                f" {i} to {i + t - 1} and keys {j} to {j + s - 1} {name}",
            )
