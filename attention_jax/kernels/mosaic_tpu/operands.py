"""The operands of the Pallas TPU kernels: arrays in tiles, and how each grid step reads them.

A kernel reads blocks whose last two axes are whole or multiples of 8 and 128. A number for each
query or key of a tile is therefore a row [1, t], which takes no padding in memory; a column [t, 1]
would take 128 times its size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core

from attention_jax.implementations import bias_tiles
from attention_jax.implementations.tile_arrays import positions
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.kernels.mosaic_tpu import position_programs
from attention_jax.kernels.mosaic_tpu.position_programs import PositionProgram, SideValues
from attention_jax.kernels.mosaic_tpu.scores import on_tpu
from attention_jax.kernels.score_forms import form_of
from attention_jax.pairwise.mask_algebra import AndMask, DenseMask, NotMask, OrMask
from attention_jax.pairwise.masks import Mask, array_field, mask_dataclass
from attention_jax.scores import Score

Array = jax.Array


class Operands(NamedTuple):
    """The arrays that every kernel reads, or the references to them, or their blocks.

    All but `params` are in tiles.
    """

    queries: Any  # features [query_tiles, t, ...]
    keys: Any  # features [key_tiles, s, ...]
    values: Any  # [key_tiles, s, Dv]
    params: list[Any]  # the parameters that `pair` reads, with at least two axes
    mask: SideValues
    mask_tables: list[Any]  # int8 [query_tiles, key_tiles, t, s]
    dropout: SideValues
    bias: SideValues
    bias_tables: list[Any]  # [query_tiles, key_tiles, t, s]


class Schedule(NamedTuple):
    """The prefetched numbers by which a kernel visits tiles of keys."""

    tile: Array  # int [query_tiles * key_tiles] the key tile of each step: every tile once
    read: Array  # int [query_tiles * key_tiles] the key tile to read: the last one when done
    full: Array  # int [query_tiles]
    visited: Array  # int [query_tiles]


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: see `programs_of`
class TilePrograms:
    """What a kernel computes on a tile, beside the attention itself."""

    plan: Plan
    score: Score  # whose `pair` and `pair_vjp` run in the kernel
    param_shapes: Any  # the shape of every parameter of the score
    params_read: tuple[int, ...]  # the places of those that `pair` reads
    mask: PositionProgram | None
    dropout: PositionProgram | None
    bias: PositionProgram
    has_bias: bool

    def params(self, matrices: list[Array]) -> Any:
        """The parameters of the score; the kernel has only the shapes of those it does not read."""
        filled, structure = jax.tree.flatten(self.param_shapes)
        for index, matrix in zip(self.params_read, matrices, strict=True):
            filled[index] = matrix.reshape(filled[index].shape)
        return jax.tree.unflatten(structure, filled)


@mask_dataclass
class _TileOfTable(Mask):
    """A tile of a table, in place of the table."""

    tile: Array = array_field("t", "s")

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        del query_positions, key_positions
        return self.tile


def schedule_of(plan: Plan, constants: Constants) -> Schedule | None:
    """The prefetched schedule; None if all key tiles are visited in order."""
    if constants.schedule is None:
        return None
    order, full, visited = (array.astype(jnp.int32) for array in constants.schedule)
    # A step that visits nothing reads the tile of the step before, which costs no transfer.
    last = jnp.maximum(visited - 1, 0)[:, None]
    steps = jnp.minimum(jnp.arange(plan.key_tiles, dtype=jnp.int32)[None, :], last)
    read = jnp.take_along_axis(order, steps, axis=1)
    return Schedule(order.reshape(-1), read.reshape(-1), full, visited)


def programs_of(plan: Plan, arrays: Arrays, constants: Constants) -> TilePrograms:
    """The programs for arrays of these shapes: the same object for the same shapes."""
    leaves, structure = jax.tree.flatten((arrays, constants))
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _programs_of(plan, structure, shapes)


@functools.lru_cache(maxsize=256)
def _programs_of(plan: Plan, structure: Any, shapes: tuple[Any, ...]) -> TilePrograms:
    arrays, constants = jax.tree.unflatten(structure, shapes)
    tile_sizes = (plan.tile.query, plan.tile.key)

    def split(function, arrays, tables=()):
        return position_programs.split(function, arrays, tables, tile_sizes)

    mask, dropout = None, None
    if constants.mask is not None:

        def allowed(mask, tables, *tile):
            tiles = (table != 0 for table in tables)
            return jnp.broadcast_to(_on_tile(mask, tiles).allowed(*tile), tile_sizes)

        tile_of_table = jax.ShapeDtypeStruct(tile_sizes, jnp.int8)
        mask = split(allowed, constants.mask, [tile_of_table for _ in _tables(constants.mask)])
    if constants.dropout_mask is not None:
        dropout = split(lambda mask, _, *tile: mask.allowed(*tile), constants.dropout_mask)

    def bias_of(biases, _, *tile):
        pairs = zip(*biases, strict=True)
        values = [bias_tiles.complete(*pair).values(*tile) for pair in pairs]
        return [value.reshape((1,) * (2 - value.ndim) + value.shape) for value in values]

    score = form_of(on_tpu, plan.options.score)
    return TilePrograms(
        plan=plan,
        score=score,
        param_shapes=arrays.params,
        params_read=_params_that_pair_reads(plan.options.score, arrays),
        mask=mask,
        dropout=dropout,
        bias=split(bias_of, (arrays.biases.functions, constants.bias_integers)),
        has_bias=bool(arrays.biases.functions or arrays.biases.tables),
    )


def operands_of(programs: TilePrograms, arrays: Arrays, constants: Constants) -> Operands:
    """The operands of the kernels, differentiable in `arrays`."""
    plan = programs.plan
    sizes = (plan.tile.query, plan.tile.key)
    tiles = [
        jax.vmap(functools.partial(positions, size=size))(jnp.arange(count)).astype(jnp.int32)
        for count, size in zip(plan.grid.tiles, sizes, strict=True)
    ]

    def values_of(program: PositionProgram | None, arrays: Any) -> SideValues:
        return SideValues([], [], []) if program is None else program.outside(arrays, *tiles)

    bias = values_of(programs.bias, (arrays.biases.functions, constants.bias_integers))
    tables = []
    for table in arrays.biases.tables:
        if table.shape[:2] == plan.grid.tiles and table.shape[2:] == sizes:
            tables.append(table)
        else:
            _add_shared_table(bias, table)
    mask_tables = [] if constants.mask is None else list(_tables(constants.mask))
    params = jax.tree.leaves(arrays.params)
    return Operands(
        queries=arrays.queries,
        keys=arrays.keys,
        values=arrays.values,
        params=[_matrix(params[index]) for index in programs.params_read],
        mask=_as_rows(values_of(programs.mask, constants.mask)),
        mask_tables=[bias_tiles.cut(table.astype(jnp.int8), plan.grid) for table in mask_tables],
        dropout=_as_rows(values_of(programs.dropout, constants.dropout_mask)),
        bias=_as_rows(bias),
        bias_tables=tables,
    )


def _tables(mask: Mask) -> Iterator[Array]:
    """The tables [T, S] in a combination of masks, in order."""
    if isinstance(mask, DenseMask):
        if 1 not in mask.table.shape:  # else it is a row or a column
            yield mask.table
    elif isinstance(mask, AndMask | OrMask):
        yield from _tables(mask.left)
        yield from _tables(mask.right)
    elif isinstance(mask, NotMask):
        yield from _tables(mask.mask)


def _on_tile(mask: Mask, tables: Iterator[Array]) -> Mask:
    """The combination of masks with the tables replaced by their tiles."""
    if isinstance(mask, DenseMask) and 1 not in mask.table.shape:
        return _TileOfTable(next(tables))
    if isinstance(mask, AndMask | OrMask):
        left = _on_tile(mask.left, tables)
        return type(mask)(left, _on_tile(mask.right, tables))
    return NotMask(_on_tile(mask.mask, tables)) if isinstance(mask, NotMask) else mask


def _add_shared_table(values: SideValues, table: Array) -> None:
    """Adds a bias table that lacks the axis T or S to the values of its side."""
    query_tiles, key_tiles, t, s = table.shape
    if t * query_tiles > 1:
        values.query.append(table.reshape(query_tiles, t, 1))
    elif s * key_tiles > 1:
        values.key.append(table.reshape(key_tiles, 1, s))
    else:
        values.shared.append(table.reshape(1, 1))


# --- rows ---


def _as_rows(values: SideValues) -> SideValues:
    """Each value as a row of 32-bit numbers: [tiles, 1, n], and [1, n] if all tiles share it."""

    def row(value: Array, axes: int) -> Array:
        return _to_32_bits(value).reshape(*value.shape[:axes], 1, math.prod(value.shape[axes:]))

    return SideValues(
        [row(value, 1) for value in values.query],
        [row(value, 1) for value in values.key],
        [row(value, 0) for value in values.shared],
    )


def _to_32_bits(value: Array) -> Array:
    if value.dtype == jnp.uint32:
        return jax.lax.bitcast_convert_type(value, jnp.int32)
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    return value.astype(jnp.int32)


def from_row(row: Array, shape: tuple[int, ...], dtype: Any, *, column: bool) -> Array:
    """A row [1, n] as it was before `_as_rows`; `column` for the numbers of queries."""
    if dtype == jnp.uint32:
        row = jax.lax.bitcast_convert_type(row, jnp.uint32)
    if column and row.shape[1] > 1:
        row = to_column(row)
    value = row.reshape(shape)
    return value != 0 if dtype == jnp.bool_ else value.astype(dtype)


def to_column(row: Array) -> Array:
    """[1, n] -> [n, 1]"""
    return row.T


def to_row(column: Array) -> Array:
    """[n, 1] -> [1, n]"""
    return column.T


# --- parameters ---


def _params_that_pair_reads(score: Score, arrays: Arrays) -> tuple[int, ...]:
    """The places of the parameters that `pair` reads; most belong to the projections.

    Raises:
        NotImplementedError: `pair` reads an array that is not an argument.
    """
    tile = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (arrays.queries, arrays.keys)
    )
    closed = jax.make_jaxpr(score.pair)(arrays.params, *tile)
    if closed.consts:
        shapes = ", ".join(str(list(jnp.shape(const))) for const in closed.consts)
        raise NotImplementedError(
            f"implementation 'mosaic_tpu': the pair of {score} reads arrays {shapes} that are not"
            " its arguments: pass them as params, or use 'tiled'"
        )
    program = closed.jaxpr
    read = {v for v in program.outvars if not isinstance(v, core.Literal)}
    for equation in reversed(program.eqns):
        if any(var in read for var in equation.outvars):
            read.update(v for v in equation.invars if not isinstance(v, core.Literal))
    count = len(jax.tree.leaves(arrays.params))
    return tuple(index for index in range(count) if program.invars[index] in read)


def _matrix(leaf: Array) -> Array:
    return leaf.reshape((1,) * (2 - leaf.ndim) + leaf.shape)


# --- blocks ---


def block(leaf: Any, axes: int, index: Callable[..., tuple]) -> pl.BlockSpec:
    """One tile of an array whose first `axes` axes count tiles: index(i, n, schedule) says which.

    i counts the tiles of queries, n the steps, and schedule is a tuple, empty without a schedule.
    """
    rest = (0,) * (leaf.ndim - axes)
    shape = (*[None] * axes, *leaf.shape[axes:])
    return pl.BlockSpec(shape, lambda i, n, *schedule: (*index(i, n, schedule), *rest))


def of_query(leaf: Any) -> pl.BlockSpec:
    """The queries' own tile."""
    return block(leaf, 1, lambda i, n, schedule: (i,))


def of_all(leaf: Any) -> pl.BlockSpec:
    """The whole array, the same for all tiles."""
    return block(leaf, 0, lambda i, n, schedule: ())


def specs(plan: Plan, operands: Operands) -> Operands:
    """The `BlockSpec` of every operand."""

    def step(i, n, schedule):
        return schedule[1][i * plan.key_tiles + n] if schedule else n

    def of_key(leaf: Array) -> pl.BlockSpec:
        return block(leaf, 1, lambda i, n, schedule: (step(i, n, schedule),))

    def of_pair(leaf: Array) -> pl.BlockSpec:
        return block(leaf, 2, lambda i, n, schedule: (i, step(i, n, schedule)))

    def of_sides(values: SideValues) -> SideValues:
        blocks = zip((of_query, of_key, of_all), values, strict=True)
        return SideValues(*(jax.tree.map(of, group) for of, group in blocks))

    return Operands(
        queries=jax.tree.map(of_query, operands.queries),
        keys=jax.tree.map(of_key, operands.keys),
        values=of_key(operands.values),
        params=jax.tree.map(of_all, operands.params),
        mask=of_sides(operands.mask),
        mask_tables=jax.tree.map(of_pair, operands.mask_tables),
        dropout=of_sides(operands.dropout),
        bias=of_sides(operands.bias),
        bias_tables=jax.tree.map(of_pair, operands.bias_tables),
    )
