"""Biases in tiles: tables are cut into tiles, functions of position are evaluated tile by tile.

A sum of biases is split into its summands. Each tile adds to its own part of a table's gradient,
while every tile adds to the gradient of a function's few arrays. Differentiable arrays (tables, and
the floats of functions) are kept apart from the integers of functions, as custom gradient rules
require.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations import tile_arrays
from attention_jax.implementations.contract import BlockSizes
from attention_jax.pairwise.biases import Bias, DenseBias, SumBias

Array = jax.Array


class Grid(NamedTuple):
    """The cut of a table [T, S] into tiles."""

    tile: BlockSizes  # t and s
    tiles: tuple[int, int]  # the number of tiles of queries and of keys


class BiasTiles(NamedTuple):
    """The differentiable arrays of a bias."""

    tables: tuple[Array, ...]  # each [query_tiles or 1, key_tiles or 1, t or 1, s or 1]
    functions: tuple[Bias, ...]  # each without its integers


def prepare(bias: Bias | None, dtype: jnp.dtype, grid: Grid) -> tuple[BiasTiles, tuple[Bias, ...]]:
    """The differentiable arrays of a bias, in the compute dtype, and its functions' integers."""
    summands = [] if bias is None else _summands(cast_floats(bias, dtype))
    functions = [part for part in summands if not isinstance(part, DenseBias)]
    tables = [cut(part.table, grid) for part in summands if isinstance(part, DenseBias)]

    def select(floating: bool) -> tuple[Bias, ...]:
        def leaf_or_none(leaf: Array) -> Array | None:
            return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) == floating else None

        return tuple(jax.tree.map(leaf_or_none, function) for function in functions)

    return BiasTiles(tuple(tables), select(True)), select(False)


def tile_values(
    biases: BiasTiles, integers: tuple[Bias, ...], grid: Grid, i: Array, j: Array
) -> Array | None:
    """The sum of all summands on one tile, [t or 1, s or 1]; None if there are no summands."""
    values = [tile_arrays.tile_of(tile_arrays.tile_of(table, i), j) for table in biases.tables]
    values += function_values(biases.functions, integers, grid, i, j)
    return sum(values[1:], start=values[0]) if values else None


def function_values(
    functions: tuple[Bias, ...], integers: tuple[Bias, ...], grid: Grid, i: Array, j: Array
) -> list[Array]:
    """The values [t, s] of each function of position on one tile."""
    t, s = grid.tile.query, grid.tile.key
    positions = tile_arrays.positions(i, t), tile_arrays.positions(j, s)
    complete = jax.tree.map(
        lambda floats, integer: integer if floats is None else floats,
        functions,
        integers,
        is_leaf=lambda leaf: leaf is None,
    )
    return [jnp.broadcast_to(function.values(*positions), (t, s)) for function in complete]


def add_gradient(
    dbiases: BiasTiles,
    biases: BiasTiles,
    integers: tuple[Bias, ...],
    dlogits: Array,
    grid: Grid,
    i: Array,
    j: Array,
) -> BiasTiles:
    """Adds the gradients that a tile's `dlogits` [t, s] send to the biases to `dbiases`."""
    tables = tuple(_add_to_table(dtable, i, j, dlogits) for dtable in dbiases.tables)
    of_tile = functools.partial(function_values, integers=integers, grid=grid, i=i, j=j)
    values, pull_back = jax.vjp(of_tile, biases.functions)
    (gradients,) = pull_back([dlogits.astype(each.dtype) for each in values])
    return BiasTiles(tables, jax.tree.map(jnp.add, dbiases.functions, gradients))


def _summands(bias: Bias) -> list[Any]:
    """The summands of a sum of biases, of any depth."""
    if isinstance(bias, SumBias):
        return _summands(bias.left) + _summands(bias.right)
    return [bias]


def cut(table: Array, grid: Grid) -> Array:
    """[T or 1, S or 1] -> [query_tiles or 1, key_tiles or 1, t or 1, s or 1], zero-padded."""
    sides = []
    for length, count, size in zip(
        table.shape, grid.tiles, (grid.tile.query, grid.tile.key), strict=True
    ):
        sides.append((1, 1, 0) if length == 1 else (count, size, count * size - length))
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
