"""`known_positions`: masks and biases of a user, traced, checked, and known by their programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.programs import (
    Part,
    check_unchanged,
    is_array,
    is_of_this_package,
)
from attention_jax.pairwise.biases import Bias, bias_dataclass
from attention_jax.pairwise.mask_algebra import Mask, TileStatus, mask_dataclass
from attention_jax.pairwise.position_functions import (
    PositionFunction,
    broadcasts,
    part_field,
    position_dataclass,
)

Array = jax.Array

_TILE = (3, 5)  # the queries and keys of the traced tile


@position_dataclass
class _KnownPart(PositionFunction):
    """A user's mask or bias with the digest of its program, a static option: a new one recompiles.

    Its methods raise ValueError unless the program is still that of the call.
    """

    digest: str
    part: Any = part_field()

    def unchanged(self) -> Any:
        part = self.part
        check_unchanged(f"{part.kind} {type(part).__name__}", self.digest, _digest(part))
        return part

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return self.unchanged().at(query_positions, key_positions)


@mask_dataclass
class KnownMask(_KnownPart, Mask):
    """A user's mask with its digest."""

    allowed = _KnownPart.at

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        return self.unchanged().tile_status(query_positions, key_positions)

    def most_keys(self) -> int:
        return self.part.most_keys()


@bias_dataclass
class KnownBias(_KnownPart, Bias):
    """A user's bias with its digest."""

    values = _KnownPart.at


def known_positions(function: Any) -> Any:
    """A mask or bias in which each part that a user wrote is traced and known by its program.

    Args:
        function: a `Mask` or `Bias` that has been checked. Its arrays may have batch axes.

    Raises:
        ValueError: `allowed` or `values` fails or does not return an array of the right kind,
            or the part uses a traced array that is no field.
    """

    def is_users(part: Any) -> bool:
        return isinstance(part, PositionFunction) and not is_of_this_package(type(part))

    def known(part: Any) -> Any:
        kind = KnownMask if isinstance(part, Mask) else KnownBias
        return kind(_digest(part), part) if is_users(part) else part

    def is_whole(part: Any) -> bool:
        return is_users(part) or isinstance(part, _KnownPart)

    return jax.tree.map(known, function, is_leaf=is_whole)


def _digest(function: PositionFunction) -> str:
    """Traces the methods of a user's mask or bias on a small tile, and checks their results."""
    part = Part(function.kind, type(function).__name__, "make it a field made by array_field()")
    part.check_signatures(function)
    is_mask = isinstance(function, Mask)
    name, kind = ("allowed", jnp.bool_) if is_mask else ("values", jnp.floating)
    contract = (
        f"{name} must return {'booleans' if is_mask else 'floats'} that broadcast to"
        f" {list(_TILE)} of {_TILE[0]} queries, {_TILE[1]} keys"
    )

    def without_batch(leaf: Any, ndim: int) -> jax.ShapeDtypeStruct:
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.result_type(float)  # its arrays are cast before tiles read them
        return jax.ShapeDtypeStruct(jnp.shape(leaf)[jnp.ndim(leaf) - ndim :], dtype)

    def program(function: Any, *positions: Array) -> Any:
        entries = part.call(name, getattr(function, name), *positions, of=positions, cure=contract)
        fits = is_array(entries, kind) and broadcasts(entries.shape, _TILE)
        part.require(fits, contract, entries)
        if not is_mask or type(function).tile_status is Mask.tile_status:
            return entries
        return entries, part.call("tile_status", function.tile_status, *positions, of=positions)

    example = jax.tree.map(without_batch, function, function.core_ndims())
    positions = [jax.ShapeDtypeStruct((size,), jnp.arange(0).dtype) for size in _TILE]
    return part.trace(program, example, *positions)
