"""Biases in tiles: tables are cut into tiles, functions of position are evaluated tile by tile.

A sum of biases is split into its summands. Each tile adds to its own part of a table's gradient,
while every tile adds to the gradient of a function's few arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.positions.biases import Bias, DenseBias, SumBias
from attention_jax.tiles import tile_arrays
from attention_jax.tiles.rounds import Plan

Array = jax.Array


class BiasTiles(NamedTuple):
    """The arrays of a bias, in the compute dtype."""

    tables: tuple[Array, ...]  # each [query_tiles or 1, key_tiles or 1, t or 1, s or 1]
    functions: tuple[Bias, ...]


def prepare(bias: Bias | None, dtype: jnp.dtype, plan: Plan) -> BiasTiles:
    """The tables of a bias, cut into tiles, and its functions."""
    summands = [] if bias is None else _summands(cast_floats(bias, dtype))
    tables = [cut_table(part.table, plan) for part in summands if isinstance(part, DenseBias)]
    functions = [part for part in summands if not isinstance(part, DenseBias)]
    return BiasTiles(tuple(tables), tuple(functions))


def tile_values(biases: BiasTiles, plan: Plan, i: Array, j: Array) -> Array | None:
    """The sum of all summands on one tile, [t or 1, s or 1]; None if there are no summands."""
    values = [tile_arrays.tile_of(tile_arrays.tile_of(table, i), j) for table in biases.tables]
    values += function_values(biases.functions, plan, i, j)
    return sum(values[1:], start=values[0]) if values else None


def function_values(functions: tuple[Bias, ...], plan: Plan, i: Array, j: Array) -> list[Array]:
    """The values [t, s] of each function of position on one tile."""
    shape, positions = (plan.tile.query, plan.tile.key), plan.positions(i, j)
    return [jnp.broadcast_to(function.values(*positions), shape) for function in functions]


def add_gradient(
    dbiases: BiasTiles, biases: BiasTiles, dlogits: Array, plan: Plan, i: Array, j: Array
) -> BiasTiles:
    """Adds the gradients that a tile's `dlogits` [t, s] send to the biases to `dbiases`."""

    def add(total: Array, gradient: Array) -> Array:
        return total if gradient.dtype == jax.dtypes.float0 else total + gradient

    tables = tuple(_add_to_table(dtable, i, j, dlogits) for dtable in dbiases.tables)
    values, pull_back = jax.vjp(lambda fs: function_values(fs, plan, i, j), biases.functions)
    (gradients,) = pull_back([dlogits.astype(each.dtype) for each in values])
    return BiasTiles(tables, jax.tree.map(add, dbiases.functions, gradients))


def _summands(bias: Bias) -> list[Any]:
    """The summands of a sum of biases, of any depth."""
    if isinstance(bias, SumBias):
        return _summands(bias.left) + _summands(bias.right)
    return [bias]


def cut_table(table: Array, plan: Plan) -> Array:
    """[T or 1, S or 1] -> [query_tiles or 1, key_tiles or 1, t or 1, s or 1], zero-padded."""
    counts, sizes = (plan.query_tiles, plan.key_tiles), (plan.tile.query, plan.tile.key)
    sides = [
        (1, 1, 0) if length == 1 else (count, size, count * size - length)
        for length, count, size in zip(table.shape, counts, sizes, strict=True)
    ]
    (query_tiles, t, query_padding), (key_tiles, s, key_padding) = sides
    table = jnp.pad(table, ((0, query_padding), (0, key_padding)))
    return table.reshape(query_tiles, t, key_tiles, s).swapaxes(1, 2)


def _add_to_table(dtable: Array, i: Array, j: Array, dlogits: Array) -> Array:
    """Adds a tile's gradient to its tile of the table's gradient, summed over broadcast axes."""
    for axis in (0, 1):
        if dtable.shape[2 + axis] == 1:
            dlogits = jnp.sum(dlogits, axis=axis, keepdims=True)
    row = 0 if dtable.shape[0] == 1 else i
    column = 0 if dtable.shape[1] == 1 else j
    return tile_arrays.add_to_tile(dtable, (row, column), dlogits)
