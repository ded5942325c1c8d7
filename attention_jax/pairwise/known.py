"""`known_mask` and `known_bias`: masks and biases of a user, traced, checked, known by program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.programs import (
    Part,
    PartError,
    check_unchanged,
    checked_array,
    is_of_this_package,
    trace,
    users_errors,
)
from attention_jax.pairwise.biases import Bias, bias_dataclass
from attention_jax.pairwise.mask_algebra import Mask, TileStatus, mask_dataclass, submask_field
from attention_jax.pairwise.position_functions import PositionFunction, part_field

Array = jax.Array

_T, _S = 3, 5  # the sizes of the traced tile


@mask_dataclass
class KnownMask(Mask):
    """A mask of a user with the digest of its program, a static option that compiles it anew."""

    digest: str
    mask: Mask = submask_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        check_unchanged(f"mask {type(self.mask).__name__}", self.digest, _digest(self.mask))
        return self.mask.allowed(query_positions, key_positions)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        check_unchanged(f"mask {type(self.mask).__name__}", self.digest, _digest(self.mask))
        return self.mask.tile_status(query_positions, key_positions)

    def most_keys(self) -> int:
        return self.mask.most_keys()


@bias_dataclass
class KnownBias(Bias):
    """A bias of a user with the digest of its program, a static option that compiles it anew."""

    digest: str
    bias: Bias = part_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        check_unchanged(f"bias {type(self.bias).__name__}", self.digest, _digest(self.bias))
        return self.bias.values(query_positions, key_positions)


def known_positions(function: Any) -> Any:
    """A mask or bias in which each part that a user wrote is traced and known by its program.

    Args:
        function: a `Mask` or `Bias` that has been checked. Its arrays may have batch axes.

    Raises:
        ValueError: `allowed` or `values` fails or does not return an array of the right kind,
            static options cannot be hashed, or the part uses a traced array that is no field.
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


def _digest(function: PositionFunction) -> str:
    """Traces the methods of a user's mask or bias on a small tile, and checks their results."""
    name = type(function).__name__
    is_mask = isinstance(function, Mask)
    method, kind = ("allowed", jnp.bool_) if is_mask else ("values", jnp.floating)
    part = Part(
        f"{function.kind} {name}",
        "make it a field, declared by array_field()",
    )
    try:
        hash(jax.tree.structure(function))
    except TypeError as error:
        raise ValueError(
            f"{part.name} must have static options that can be hashed, such as a tuple"
            f" ({error}); declare an array by array_field()"
        ) from error

    def without_batch(leaf: Any, ndim: int) -> jax.ShapeDtypeStruct:
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.result_type(float)  # tiles have other floats than a call
        return jax.ShapeDtypeStruct(jnp.shape(leaf)[jnp.ndim(leaf) - ndim :], dtype)

    example = jax.tree.map(without_batch, function, function.core_ndims())
    positions = [jax.ShapeDtypeStruct((size,), jnp.arange(0).dtype) for size in (_T, _S)]
    of = f"query_positions [{_T}] and key_positions [{_S}]"
    what = "booleans" if is_mask else "floats"
    expected = f"{method} must return {what} that broadcast to {[_T, _S]} of {of}"

    def run(function: Any, queries: Array, keys: Array) -> Any:
        with users_errors(part, f"{method} of {of}", expected):
            result = getattr(function, method)(queries, keys)
        result = checked_array(result, expected)
        ones = (1,) * (2 - result.ndim)
        sizes = zip((*ones, *result.shape), (_T, _S), strict=False)
        fits = result.ndim <= 2 and all(size in (1, to) for size, to in sizes)
        if not fits or not jnp.issubdtype(result.dtype, kind):
            raise PartError(f"{expected}; got {result.dtype} {list(result.shape)}")
        if not is_mask or type(function).tile_status is Mask.tile_status:
            return result
        with users_errors(part, f"tile_status of {of}"):
            return result, tuple(function.tile_status(queries, keys))

    return trace(part, run, example, *positions)
