"""`known_positions`: masks and biases of a user, traced, checked, and known by their programs."""

from __future__ import annotations

import dataclasses
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
from attention_jax.pairwise.mask_algebra import Mask, TileStatus, mask_dataclass, submask_field
from attention_jax.pairwise.position_functions import PositionFunction, broadcasts, part_field

Array = jax.Array

_TILE = (3, 5)  # the queries and keys of the traced tile


@mask_dataclass
class KnownMask(Mask):
    """A mask of a user with the digest of its program, a static option that compiles it anew."""

    digest: str
    mask: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return _unchanged(self.mask, self.digest).allowed(query_positions, key_positions)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        return _unchanged(self.mask, self.digest).tile_status(query_positions, key_positions)

    def most_keys(self) -> int:
        return self.mask.most_keys()


@bias_dataclass
class KnownBias(Bias):
    """A bias of a user with the digest of its program, a static option that compiles it anew."""

    digest: str
    bias: Bias = part_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        return _unchanged(self.bias, self.digest).values(query_positions, key_positions)


def known_positions(function: Any) -> Any:
    """A mask or bias in which each part that a user wrote is traced and known by its program.

    Args:
        function: a `Mask` or `Bias` that has been checked. Its arrays may have batch axes.

    Raises:
        ValueError: `allowed` or `values` fails or does not return an array of the right kind,
            or the part uses a traced array that is no field.
    """
    if not is_of_this_package(type(function)):
        known = KnownMask if isinstance(function, Mask) else KnownBias
        return known(_digest(function), function)
    if isinstance(function, KnownMask | KnownBias):
        return function
    parts = {
        name: known_positions(value)
        for name, value, core_axes in function._leaves()
        if core_axes is None and value is not None
    }
    if all(part is getattr(function, name) for name, part in parts.items()):
        return function
    return dataclasses.replace(function, **parts)


def _unchanged(function: Any, digest: str) -> Any:
    """A user's mask or bias; raises ValueError unless its program is that of the call."""
    check_unchanged(f"{function.kind} {type(function).__name__}", digest, _digest(function))
    return function


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
            dtype = jnp.result_type(float)  # tiles have other floats than a call
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
