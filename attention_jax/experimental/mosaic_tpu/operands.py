"""The operands of the Pallas TPU kernels: arrays in tiles, and how each grid step reads them.

The last two axes of a block are whole axes of the array, or multiples of 8 and 128. A number for
each query or key of a tile is therefore a row [1, t], which takes no padding in memory; a column
[t, 1] would take 128 times its size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core

from attention_jax.core.batches import all_over_batch, any_over_batch
from attention_jax.experimental.kernel_attention import KernelPlan
from attention_jax.experimental.mosaic_tpu.scores import on_tpu
from attention_jax.experimental.score_forms import form_of
from attention_jax.experimental.visible_keys import VisibleKeys, ranges
from attention_jax.kernels.preparation import refuse
from attention_jax.kernels.windows import Windows
from attention_jax.scores import Score
from attention_jax.tiles.features import Operands
from attention_jax.tiles.prepare import cut

Array = jax.Array

LANES = 128  # numbers in a row of a vector register


class VisitSchedule(NamedTuple):
    """The prefetched numbers by which a kernel visits tiles of keys, int32 [query_tiles] each."""

    first: Array  # tile of keys
    end: Array
    first_full: Array  # the tiles between these two are not masked
    end_full: Array


class Blocks(NamedTuple):
    """The arrays that a kernel reads, in tiles; or the references to them, or their blocks."""

    schedule: VisitSchedule | None  # None if all tiles of keys are visited in order, without masks
    # Features and values [tiles, t or s, ...], and a list of the parameters that `pair` reads, with
    # at least two axes.
    operands: Operands
    windows: Windows  # rows [query_tiles, 1, t], [key_tiles, 1, s]; None if all see all
    # Of the backward kernel: the first three `RowTerms`, [query_tiles, 1, t]; and dO / total.
    terms: Any = None
    doutput: Any = None  # [query_tiles, t, Dv]


@dataclasses.dataclass(frozen=True)
class TileProgram:
    """What a kernel computes on a tile, beside the attention itself."""

    plan: KernelPlan
    params_structure: Any
    param_shapes: tuple[Any, ...]  # of each parameter of the score; None if `pair` does not read it

    @property
    def score(self) -> Score:
        """The score whose `pair` and `pair_vjp` run in the kernel."""
        score: Score = form_of(on_tpu, self.plan.options.score)
        return score

    def read(self, params: Any) -> list[Any]:
        """The parameters that `pair` reads."""
        pairs = zip(jax.tree.leaves(params), self.param_shapes, strict=True)
        return [leaf for leaf, shape in pairs if shape is not None]

    def params(self, matrices: list[Any]) -> Any:
        """The parameters of the score, 0 for those that `pair` does not read."""
        remaining = iter(matrices)
        leaves = (
            jnp.zeros((), jnp.float32) if shape is None else next(remaining).reshape(shape)
            for shape in self.param_shapes
        )
        return jax.tree.unflatten(self.params_structure, leaves)


def tile_program(plan: KernelPlan, operands: Operands) -> TileProgram:
    """The program for operands of these shapes; most parameters belong to the projections.

    Raises:
        NotImplementedError: `pair` reads an array that is not an argument.
    """
    score = plan.options.score
    tiles = [
        jax.tree.map(lambda leaf, n=n: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), side)
        for side, n in zip(operands[:2], plan.tile, strict=True)
    ]
    closed = jax.make_jaxpr(score.pair)(operands.params, *tiles)
    if closed.consts:
        shapes = ", ".join(str(list(jnp.shape(const))) for const in closed.consts)
        refuse(
            "mosaic_tpu",
            f"does not serve the pair of {score}, which reads arrays {shapes} that are not its"
            " arguments: pass them as params",
        )
    read = set(closed.jaxpr.outvars)
    for equation in reversed(closed.jaxpr.eqns):
        if not read.isdisjoint(equation.outvars):
            read.update(v for v in equation.invars if not isinstance(v, core.Literal))
    leaves, structure = jax.tree.flatten(operands.params)
    variables = zip(leaves, closed.jaxpr.invars, strict=False)  # the tokens come last
    return TileProgram(
        plan, structure, tuple(leaf.shape if v in read else None for leaf, v in variables)
    )


def operands_in_tiles(program: TileProgram, operands: Operands) -> Operands:
    """The operands as the kernels read them; see `Blocks`."""
    of_queries, of_keys = (functools.partial(cut, count=n) for n in program.plan.tiles)
    return Operands(
        queries=jax.tree.map(of_queries, operands.queries),
        keys=jax.tree.map(of_keys, operands.keys),
        values=of_keys(operands.values),
        params=[
            leaf.reshape((1,) * (2 - leaf.ndim) + leaf.shape)
            for leaf in program.read(operands.params)
        ],
    )


def rows_in_tiles(rows: Any, tiles: int) -> Any:
    """[length] -> [tiles, 1, length / tiles], of each array."""
    return jax.tree.map(lambda row: row.reshape(tiles, 1, -1), rows)


def kernel_blocks(plan: KernelPlan, operands: Operands, visible: VisibleKeys | None) -> Blocks:
    """What the forward kernel reads, and the backward kernel too.

    Args:
        plan: the static part.
        operands: in tiles.
        visible: None if each query sees each key.
    """
    if visible is None:
        return Blocks(None, operands, Windows(None, None))
    windows, visited, full = visible
    columns = ranges(any_over_batch(visited)), ranges(all_over_batch(full))
    schedule = VisitSchedule(*(column for both in columns for column in both.T))
    rows = windows.map(*(functools.partial(rows_in_tiles, tiles=tiles) for tiles in plan.tiles))
    return Blocks(schedule, operands, rows)


def key_tile(schedule: VisitSchedule | None, i: Any, n: Any) -> Any:
    """The tile of keys that step n reads; if it visits nothing, that of the last step that does."""
    if schedule is None:
        return n
    return jnp.clip(schedule.first[i] + n, 0, jnp.maximum(schedule.end[i] - 1, 0))


# --- which block of an array a step reads ---


def of_query(array: Any) -> pl.BlockSpec:
    """The queries' own tile."""
    return _of_tile(array, lambda i, n, *schedule: i)


def of_key(array: Any) -> pl.BlockSpec:
    """The tile of keys that the step reads."""

    def tile(i: Any, n: Any, *schedule: Any) -> Any:
        return key_tile(VisitSchedule(*schedule) if schedule else None, i, n)

    return _of_tile(array, tile)


def of_all(array: Any) -> pl.BlockSpec:
    """The whole array, the same for all tiles."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _of_tile(array: Any, tile: Callable[..., Any]) -> pl.BlockSpec:
    _, *shape = array.shape
    rest = (0,) * len(shape)
    return pl.BlockSpec((None, *shape), lambda *step: (tile(*step), *rest))


def specs(blocks: Blocks) -> Blocks:
    """The `BlockSpec` of each array that a kernel reads, without the schedule."""
    _, (queries, keys, values, params), windows, *rows = blocks
    of_keys = jax.tree.map(of_key, (keys, values))
    operands = jax.tree.map(of_query, queries), *of_keys, jax.tree.map(of_all, params)
    return Blocks(
        None, Operands(*operands), windows.map(of_query, of_key), *jax.tree.map(of_query, rows)
    )


def gradient_specs(gradients: Operands) -> Operands:
    """The `BlockSpec` of each array that the backward kernel writes."""
    queries, *of_example = gradients
    return Operands(jax.tree.map(of_query, queries), *jax.tree.map(of_all, of_example))
