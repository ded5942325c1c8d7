"""The operands of the Pallas TPU kernels: arrays in tiles, and how each grid step reads them.

A kernel reads blocks whose last two axes are whole or multiples of 8 and 128. A number for each
query or key of a tile is therefore a row [1, t], which takes no padding in memory; a column [t, 1]
would take 128 times its size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core

from attention_jax.core.batches import all_over_batch, any_over_batch
from attention_jax.implementations.tile_arrays import tiled
from attention_jax.kernels.mosaic_tpu.scores import on_tpu
from attention_jax.kernels.rule import Call
from attention_jax.kernels.score_forms import form_of
from attention_jax.kernels.tokens import Operands, refuse
from attention_jax.kernels.windows import Windows, ranges, tile_statuses
from attention_jax.scores import Score

Array = jax.Array

LANES = 128  # numbers in a row of a vector register


class Blocks(NamedTuple):
    """The arrays that every kernel reads, in tiles; or the references to them, or their blocks."""

    queries: Any  # features [query_tiles, t, ...]
    keys: Any  # features [key_tiles, s, ...]
    values: Any  # [key_tiles, s, Dv]
    params: list[Any]  # the parameters that `pair` reads, with at least two axes
    windows: Any = None  # those of `rows_of_windows`


class Schedule(NamedTuple):
    """The prefetched numbers by which a kernel visits tiles of keys, int32 [query_tiles] each."""

    first: Array  # tile of keys
    end: Array
    first_full: Array  # the tiles between these two are not masked
    end_full: Array


@dataclasses.dataclass(frozen=True)
class Program:
    """What a kernel computes on a tile, beside the attention itself."""

    call: Call
    param_shapes: tuple[tuple[int, ...], ...]  # of every parameter of the score
    params_structure: Any
    params_read: tuple[int, ...]  # the places of those that `pair` reads

    @property
    def score(self) -> Score:
        """The score whose `pair` and `pair_vjp` run in the kernel."""
        score: Score = form_of(on_tpu, self.call.options.score)
        return score

    def params(self, matrices: list[Any]) -> Any:
        """The parameters of the score, 0 for those that `pair` does not read."""
        filled: list[Any] = [jnp.zeros((), jnp.float32)] * len(self.param_shapes)
        for index, matrix in zip(self.params_read, matrices, strict=True):
            filled[index] = matrix.reshape(self.param_shapes[index])
        return jax.tree.unflatten(self.params_structure, filled)


def program_of(call: Call, operands: Operands) -> Program:
    """The program for operands of these shapes."""
    leaves, structure = jax.tree.flatten(operands.params)
    shapes = tuple(leaf.shape for leaf in leaves)
    return Program(call, shapes, structure, _params_that_pair_reads(call, operands))


def blocks_of(program: Program, operands: Operands) -> Blocks:
    """The operands in tiles, without windows."""
    query_tiles, key_tiles = program.call.tiles
    params = jax.tree.leaves(operands.params)
    matrices = [params[index] for index in program.params_read]
    return Blocks(
        queries=jax.tree.map(functools.partial(tiled, count=query_tiles), operands.queries),
        keys=jax.tree.map(functools.partial(tiled, count=key_tiles), operands.keys),
        values=tiled(operands.values, key_tiles),
        params=[leaf.reshape((1,) * (2 - leaf.ndim) + leaf.shape) for leaf in matrices],
    )


def rows_of_windows(call: Call, windows: Windows | None) -> Windows | None:
    """The windows as rows, [query_tiles, 1, t] and [key_tiles, 1, s]."""
    if windows is None:
        return None
    query_tiles, key_tiles = call.tiles
    return windows.map(
        lambda row: row.reshape(query_tiles, 1, -1), lambda row: row.reshape(key_tiles, 1, -1)
    )


def schedule_of(call: Call, windows: Windows | None) -> Schedule | None:
    """The prefetched schedule of the whole batch; None if all key tiles are visited in order."""
    if windows is None:
        return None
    visited, full = tile_statuses(windows, call.tile, call.tiles[1])
    columns = ranges(any_over_batch(visited)), ranges(all_over_batch(full))
    return Schedule(*(column for both in columns for column in both.T))


def key_tile(schedule: Schedule | None, i: Any, n: Any) -> Any:
    """The tile of keys that step n reads; that of the step before if it visits nothing."""
    if schedule is None:
        return n
    return jnp.clip(schedule.first[i] + n, 0, jnp.maximum(schedule.end[i] - 1, 0))


def _params_that_pair_reads(call: Call, operands: Operands) -> tuple[int, ...]:
    """The places of the parameters that `pair` reads; most belong to the projections.

    Raises:
        NotImplementedError: `pair` reads an array that is not an argument.
    """
    score = call.options.score
    sides = zip((operands.queries, operands.keys), call.tile, strict=True)
    tiles = [
        jax.tree.map(lambda leaf, n=n: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), side)
        for side, n in sides
    ]
    closed = jax.make_jaxpr(score.pair)(operands.params, *tiles)
    if closed.consts:
        shapes = ", ".join(str(list(jnp.shape(const))) for const in closed.consts)
        refuse(
            "mosaic_tpu",
            f"does not serve the pair of {score}, which reads arrays {shapes} that are not its"
            " arguments: pass them as params",
        )
    program = closed.jaxpr
    read = {v for v in program.outvars if not isinstance(v, core.Literal)}
    for equation in reversed(program.eqns):
        if any(var in read for var in equation.outvars):
            read.update(v for v in equation.invars if not isinstance(v, core.Literal))
    count = len(jax.tree.leaves(operands.params))
    return tuple(index for index in range(count) if program.invars[index] in read)


# --- blocks ---


def block(leaf: Any, axes: int, index: Callable[..., Any]) -> pl.BlockSpec:
    """One tile of an array, of index(i, n, schedule) if its first axis counts tiles, else all.

    i counts the tiles of queries and n the steps; the schedule is a tuple, empty without one.
    """
    shape = (*[None] * axes, *leaf.shape[axes:])
    rest = (0,) * (leaf.ndim - axes)
    return pl.BlockSpec(shape, lambda i, n, *schedule: (*index(i, n, schedule)[:axes], *rest))


def of_query(leaf: Any) -> pl.BlockSpec:
    """The queries' own tile."""
    return block(leaf, 1, lambda i, n, schedule: (i,))


def of_all(leaf: Any) -> pl.BlockSpec:
    """The whole array, the same for all tiles."""
    return block(leaf, 0, lambda i, n, schedule: ())


def of_key(leaf: Any) -> pl.BlockSpec:
    """The tile of keys that the step reads."""

    def index(i: Array, n: Array, schedule: tuple[Array, ...]) -> tuple[Array]:
        return (key_tile(Schedule(*schedule) if schedule else None, i, n),)

    return block(leaf, 1, index)


def specs(blocks: Blocks) -> Blocks:
    """The `BlockSpec` of every operand."""
    return Blocks(
        queries=jax.tree.map(of_query, blocks.queries),
        keys=jax.tree.map(of_key, blocks.keys),
        values=of_key(blocks.values),
        params=jax.tree.map(of_all, blocks.params),
        windows=None if blocks.windows is None else blocks.windows.map(of_query, of_key),
    )
