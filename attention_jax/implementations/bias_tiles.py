"""A bias in tiles: stored tables are cut up, functions of position are asked tile by tile.

A sum of biases is taken apart, since a table's gradient comes tile by tile, where a function's
reaches its few arrays from every tile. What gradients reach (a table in tiles; of a function, its
floats) and the rest (its integers) are kept apart, as gradient rules want them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations import tile_arrays
from attention_jax.implementations.contract import BlockSizes
from attention_jax.pairwise.biases import Bias, DenseBias, SumBias

Array = jax.Array


class Grid(NamedTuple):
    """How a table [T, S] is cut."""

    tile: BlockSizes
    tiles: tuple[int, int]  # of queries, of keys


class BiasTiles(NamedTuple):
    """What gradients reach."""

    tables: tuple[Array, ...]  # each [query_tiles or 1, key_tiles or 1, t or 1, s or 1]
    functions: tuple[Bias, ...]  # each without its integers


def prepare(bias: Bias | None, dtype: jnp.dtype, grid: Grid) -> tuple[BiasTiles, tuple[Bias, ...]]:
    """The bias in tiles, in the compute dtype; and of each function, its integers."""
    summands = [] if bias is None else _summands(cast_floats(bias, dtype))
    functions = [part for part in summands if not isinstance(part, DenseBias)]
    tables = [_cut(part.table, grid) for part in summands if isinstance(part, DenseBias)]

    def only(floating: bool) -> tuple[Bias, ...]:
        def keep(leaf: Array) -> Array | None:
            return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) == floating else None

        return tuple(jax.tree.map(keep, function) for function in functions)

    return BiasTiles(tuple(tables), only(True)), only(False)


def tile_values(
    biases: BiasTiles, integers: tuple[Bias, ...], grid: Grid, i: Array, j: Array
) -> Array | None:
    """The sum of all, [t or 1, s or 1]; None if there are none."""
    values = [tile_arrays.tile_of(tile_arrays.tile_of(table, i), j) for table in biases.tables]
    values += [
        function_values(*pair, grid, i, j) for pair in zip(biases.functions, integers, strict=True)
    ]
    return sum(values[1:], start=values[0]) if values else None


def function_values(function: Bias, integers: Bias, grid: Grid, i: Array, j: Array) -> Array:
    """One function of position, [t, s]."""
    whole = jax.tree.map(
        lambda real, other: other if real is None else real,
        function,
        integers,
        is_leaf=lambda leaf: leaf is None,
    )
    t, s = grid.tile.query, grid.tile.key
    values = whole.values(tile_arrays.positions(i, t), tile_arrays.positions(j, s))
    return jnp.broadcast_to(values, (t, s))


def add_gradient(
    dbiases: BiasTiles,
    biases: BiasTiles,
    integers: tuple[Bias, ...],
    grid: Grid,
    i: Array,
    j: Array,
    dlogits: Array,
) -> BiasTiles:
    """`dbiases` with what a tile's `dlogits` [t, s] send to each."""
    tables = tuple(_add_to_table(dtable, i, j, dlogits) for dtable in dbiases.tables)
    functions = []
    for dfunction, function, others in zip(
        dbiases.functions, biases.functions, integers, strict=True
    ):
        values, pull_back = jax.vjp(
            lambda function, others=others: function_values(function, others, grid, i, j),
            function,
        )
        (tile_gradient,) = pull_back(dlogits.astype(values.dtype))
        functions.append(jax.tree.map(jnp.add, dfunction, tile_gradient))
    return BiasTiles(tables, tuple(functions))


def _summands(bias: Bias) -> list[Any]:
    if isinstance(bias, SumBias):
        return _summands(bias.left) + _summands(bias.right)
    return [bias]


def _cut(table: Array, grid: Grid) -> Array:
    sides = []
    for length, count, size in zip(
        table.shape, grid.tiles, (grid.tile.query, grid.tile.key), strict=True
    ):
        sides.append((1, 1, 0) if length == 1 else (count, size, count * size - length))
    (query_tiles, t, query_padding), (key_tiles, s, key_padding) = sides
    table = jnp.pad(table, ((0, query_padding), (0, key_padding)))
    return table.reshape(query_tiles, t, key_tiles, s).swapaxes(1, 2)


def _add_to_table(dtable: Array, i: Array, j: Array, dlogits: Array) -> Array:
    """Adds a tile's gradient where the table had its tile, summed where it was broadcast."""
    for axis in (0, 1):
        if dtable.shape[2 + axis] == 1:
            dlogits = jnp.sum(dlogits, axis=axis, keepdims=True)
    row = 0 if dtable.shape[0] == 1 else i
    column = 0 if dtable.shape[1] == 1 else j
    return tile_arrays.add_to_tile(dtable, (row, column), dlogits)
