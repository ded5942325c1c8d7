"""The Pallas TPU kernels of attention: forward, and one backward pass for all gradients.

The grid is (tiles of queries, steps); each step visits one tile of keys. A kernel calls the score's
own `pair` and `pair_vjp` on its tiles, so that it serves every score which Mosaic can lower.

The backward kernel computes each tile's logits and weights once and adds to the gradients of the
queries, the keys and the values. The gradients of all keys stay in VMEM until the last step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention_jax.core.products import einsum
from attention_jax.kernels.mosaic_tpu.operands import (
    Operands,
    Schedule,
    TilePrograms,
    from_row,
    to_column,
    to_row,
)
from attention_jax.kernels.mosaic_tpu.position_programs import PositionProgram, SideValues
from attention_jax.kernels.mosaic_tpu.scores import transposed_product
from attention_jax.pairwise import dropout

Array = jax.Array

LANES = 128  # numbers in a row of a vector register


class Rows(NamedTuple):
    """What the backward kernel reads of each query, [query_tiles, 1, t]."""

    reference: Array  # subtracted from the logits; +inf for a row without keys
    scale: Array  # 1 / divisor; 0 for a row without keys
    offset: Array  # added to the cotangents of the weights, divided by the divisor
    dentropy: Array | None  # divided by the divisor


class Tile:
    """One tile in a kernel: the blocks that the grid step reads."""

    def __init__(self, programs: TilePrograms, refs: Operands):
        self.programs, self.refs = programs, refs
        read = functools.partial(jax.tree.map, lambda ref: ref[...])
        self.queries, self.keys, self.values = read((refs.queries, refs.keys, refs.values))
        self.params = programs.params([ref[...] for ref in refs.params])

    def logits(self, masked: bool) -> Array:
        """The logits [t, s] with the biases, -inf where masked."""
        logits = self.programs.score.pair(self.params, self.queries, self.keys)
        logits = logits.astype(jnp.float32)
        bias = bias_values(self.programs.bias, self.bias_floats())
        if bias is not None:
            logits = logits + bias
        if masked:
            program = self.programs.mask
            assert program is not None
            tables = [ref[...] for ref in self.refs.mask_tables]
            allowed = program.inside(_values(program, self.refs.mask), tables)
            logits = jnp.where(allowed, logits, -jnp.inf)
        return logits

    def kept(self, weights: Array) -> Array:
        """The weights after dropout."""
        program = self.programs.dropout
        if program is None:
            return weights
        keep = program.inside(_values(program, self.refs.dropout), ())
        return dropout.drop(weights, keep, self.programs.plan.options.dropout_rate)

    def bias_floats(self) -> tuple[SideValues, list[Array]]:
        """The values and the tables of the biases on this tile."""
        tables = [ref[...] for ref in self.refs.bias_tables]
        return _values(self.programs.bias, self.refs.bias), tables


def _values(program: PositionProgram, refs: SideValues) -> SideValues:
    """The values of one tile, as they were before they became rows."""

    def read(group: list[Any], shapes: list[Any], *, column: bool) -> list[Array]:
        values = [
            from_row(ref[...], shape.shape, shape.dtype, column=column)
            for ref, shape in zip(group, shapes, strict=False)
        ]
        rest = group[len(shapes) :]  # bias tables that lack an axis
        return values + [to_column(ref[...]) if column else ref[...] for ref in rest]

    return SideValues(
        read(refs.query, program.shapes.query, column=True),
        read(refs.key, program.shapes.key, column=False),
        read(refs.shared, program.shapes.shared, column=False),
    )


def bias_values(program: PositionProgram, floats: tuple[SideValues, list[Array]]) -> Any:
    """The sum of all biases on a tile, broadcastable to [t, s]; None if there are none."""
    values, tables = floats
    counts = [len(shapes) for shapes in program.shapes]
    own = SideValues(*(group[:count] for group, count in zip(values, counts, strict=True)))
    rest = [value for group, count in zip(values, counts, strict=True) for value in group[count:]]
    terms = [*program.inside(own, ()), *rest, *tables]
    return functools.reduce(jnp.add, terms) if terms else None


def visit_tiles(schedule: Schedule | None, i: Array, n: Array, visit: Callable[[bool], None]):
    """Calls visit(masked) if the step visits a tile of keys: full tiles come before masked ones."""
    if schedule is None:
        visit(False)
        return
    full, visited = schedule.full[i], schedule.visited[i]
    pl.when(n < full)(lambda: visit(False))
    pl.when((n >= full) & (n < visited))(lambda: visit(True))


# --- forward ---


class ForwardState(NamedTuple):
    """The online softmax of `normalizers.online_softmax`; sums over keys are kept per lane."""

    largest: Any  # [t, lanes], the same in all lanes
    total: Any  # [t, lanes]
    weighted: Any  # [t, Dv]
    excess: Any  # [t, lanes]; None without statistics


def forward_kernel(
    programs: TilePrograms,
    schedule: Schedule | None,
    refs: Operands,
    output: Any,  # [t, Dv]
    largest: Any,  # [1, t]
    total: Any,  # [1, t]
    excess: Any,  # [1, t]; None without statistics
    state: ForwardState,
) -> None:
    """output = sum_j exp(x_j - largest) v_j / total, total = sum_j exp(x_j - largest)"""
    i, n = pl.program_id(0), pl.program_id(1)

    @pl.when(n == 0)
    def _():
        # The lowest float: a masked logit, -inf, minus -inf would be NaN.
        state.largest[...] = jnp.full_like(state.largest, jnp.finfo(jnp.float32).min)
        for sums in (state.total, state.weighted, state.excess):
            if sums is not None:
                sums[...] = jnp.zeros_like(sums)

    visit_tiles(schedule, i, n, lambda masked: _update(Tile(programs, refs), state, masked))

    @pl.when(n == pl.num_programs(1) - 1)
    def _():
        total_of_row = jnp.sum(state.total[...], axis=1, keepdims=True)
        any_key = total_of_row != 0  # `> 0` would hide a NaN
        scale = 1 / jnp.where(any_key, total_of_row, 1)
        output[...] = jnp.where(any_key, state.weighted[...] * scale, 0).astype(output.dtype)
        largest[...] = to_row(state.largest[:, :1])
        total[...] = to_row(total_of_row)
        if excess is not None:
            excess[...] = to_row(jnp.sum(state.excess[...], axis=1, keepdims=True))


def _update(tile: Tile, state: ForwardState, masked: bool) -> None:
    logits = tile.logits(masked)
    previous = state.largest[...]
    largest = jnp.maximum(previous, jnp.max(logits, axis=1, keepdims=True))
    shrink = jnp.exp(previous - largest)
    shifted = logits - _repeat(largest, logits.shape[1])
    weights = jnp.exp(shifted)
    if state.excess is not None:
        # A term with weight 0 is 0: 0 * -inf would be NaN.
        terms = weights * jnp.where(weights > 0, shifted, 0)
        drop = jnp.where(shrink > 0, previous - largest, 0)
        excess = shrink * (state.excess[...] + drop * state.total[...])
        state.excess[...] = excess + _sum_per_lane(terms, excess.shape[1])
    state.largest[...] = largest
    state.total[...] = shrink * state.total[...] + _sum_per_lane(weights, shrink.shape[1])
    weighted = einsum("ts,sd->td", tile.kept(weights), tile.values)
    state.weighted[...] = _repeat(shrink, weighted.shape[1]) * state.weighted[...] + weighted


def _repeat(per_lane: Array, width: int) -> Array:
    """[t, lanes], the same in all lanes -> [t, width], or [t, 1]"""
    lanes = per_lane.shape[1]
    if lanes == 1 or width % lanes:
        return per_lane[:, :1]
    return per_lane if width == lanes else jnp.tile(per_lane, (1, width // lanes))


def _sum_per_lane(terms: Array, lanes: int) -> Array:
    """[t, s] -> [t, lanes]: sums of every lanes-th column, which need no exchange between lanes"""
    if lanes == 1:
        return jnp.sum(terms, axis=1, keepdims=True)
    parts = [terms[:, first : first + lanes] for first in range(0, terms.shape[1], lanes)]
    return functools.reduce(jnp.add, parts)


# --- backward ---


class Gradients(NamedTuple):
    """What the backward kernel writes."""

    queries: Any  # [t, ...] of each array of features
    keys: Any  # [key_tiles, s, ...] of each array of features
    values: Any  # [key_tiles, s, Dv]
    params: list[Any]  # of the matrices
    bias: SideValues  # rows: [1, n], [key_tiles, 1, n], [1, n]
    bias_tables: list[Any]  # [t, s]


class BackwardState(NamedTuple):
    """The scratch memory of the backward kernel."""

    doutput: Any  # [t, Dv] divided by the rows' divisors, 0 for rows without keys
    reference: Any  # [t, lanes]
    offset: Any  # [t, lanes]
    dentropy: Any  # [t, lanes], or None
    sums: Gradients  # in float32, the shapes of the results; None for a bias table


# With x the logits, w = exp(x - reference) and the rows' terms divided by the divisor,
#     dw_j = dropout(dO . v_j) + offset - dentropy (x_j - reference),    dx_j = w_j dw_j,
# as in `tiled`, which derives it.
def backward_kernel(
    programs: TilePrograms,
    schedule: Schedule | None,
    refs: Operands,
    rows: Rows,
    doutput: Any,  # [t, Dv]
    gradients: Gradients,
    state: BackwardState,
) -> None:
    """The gradients of all operands."""
    i, n = pl.program_id(0), pl.program_id(1)
    first_of_query, last_of_query = n == 0, n == pl.num_programs(1) - 1
    sums = state.sums
    per_query = (sums.queries, sums.bias.query)
    per_example = (sums.keys, sums.values, sums.params, sums.bias.key, sums.bias.shared)

    @pl.when((i == 0) & first_of_query)
    def _():
        for leaf in jax.tree.leaves(per_example):
            leaf[...] = jnp.zeros_like(leaf)

    @pl.when(first_of_query)
    def _():
        for leaf in jax.tree.leaves(per_query):
            leaf[...] = jnp.zeros_like(leaf)
        scale = to_column(rows.scale[...])
        # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
        scaled = jnp.where(scale > 0, doutput[...].astype(jnp.float32) * scale, 0)
        state.doutput[...] = scaled.astype(state.doutput.dtype)
        columns: tuple[tuple[Any, Any], ...] = (
            (state.reference, rows.reference),
            (state.offset, rows.offset),
            (state.dentropy, rows.dentropy),
        )
        for column, row in columns:
            if column is not None:
                column[...] = jnp.broadcast_to(to_column(row[...]), column.shape)

    for table in gradients.bias_tables:  # an empty tile gets gradient 0
        table[...] = jnp.zeros_like(table)
    j = n if schedule is None else schedule.tile[i * pl.num_programs(1) + n]
    visit_tiles(
        schedule,
        i,
        n,
        lambda masked: _add_gradients(Tile(programs, refs), state, gradients, j, masked),
    )

    @pl.when(last_of_query)
    def _():
        _store((gradients.queries, gradients.bias.query), per_query)

    @pl.when((i == pl.num_programs(0) - 1) & last_of_query)
    def _():
        results = gradients.keys, gradients.values, gradients.params
        _store((*results, gradients.bias.key, gradients.bias.shared), per_example)


def _add_gradients(
    tile: Tile, state: BackwardState, gradients: Gradients, j: Array, masked: bool
) -> None:
    logits = tile.logits(masked)
    width = logits.shape[1]
    shifted = logits - _repeat(state.reference[...], width)
    weights = jnp.exp(shifted)
    doutput = state.doutput[...]
    dweights = tile.kept(einsum("td,sd->ts", doutput, tile.values))
    dweights = dweights + _repeat(state.offset[...], width)
    if state.dentropy is not None:
        # A term with weight 0 is 0: 0 * -inf would be NaN.
        finite = jnp.where(weights > 0, shifted, 0)
        dweights = dweights - _repeat(state.dentropy[...], width) * finite
    dlogits = weights * dweights
    state.sums.values[j] += transposed_product(doutput, tile.kept(weights))
    dparams, dqueries, dkeys = tile.programs.score.pair_vjp(
        tile.params, tile.queries, tile.keys, dlogits
    )
    _add(state.sums.queries, dqueries)
    _add(state.sums.keys, dkeys, j)
    leaves = jax.tree.leaves(dparams)
    for total, index in zip(state.sums.params, tile.programs.params_read, strict=True):
        total[...] += leaves[index].reshape(total.shape)
    _add_bias_gradients(tile, state.sums.bias, gradients.bias_tables, j, dlogits)


def _add_bias_gradients(
    tile: Tile, sums: SideValues, tables: list[Any], j: Array, dlogits: Array
) -> None:
    floats = tile.bias_floats()
    leaves, structure = jax.tree.flatten(floats)
    places = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not places:
        return

    def bias_of(differentiable: list[Array]) -> Array:
        filled = list(leaves)
        for place, leaf in zip(places, differentiable, strict=True):
            filled[place] = leaf
        values = bias_values(tile.programs.bias, jax.tree.unflatten(structure, filled))
        return jnp.broadcast_to(values, dlogits.shape)

    _, pull_back = jax.vjp(bias_of, [leaves[place] for place in places])
    dleaves: list[Any] = [None] * len(leaves)
    for place, dleaf in zip(places, pull_back(dlogits)[0], strict=True):
        dleaves[place] = dleaf
    dvalues, dtables = jax.tree.unflatten(structure, dleaves)
    for table, dtable in zip(tables, dtables, strict=True):
        table[...] = dtable
    for total, dvalue in zip(sums.query, dvalues.query, strict=True):
        if dvalue is not None:
            total[...] += to_row(dvalue.reshape(-1, 1)) if dvalue.size > 1 else dvalue.reshape(1, 1)
    for total, dvalue in zip(sums.key, dvalues.key, strict=True):
        if dvalue is not None:
            total[j] += dvalue.reshape(1, -1)
    for total, dvalue in zip(sums.shared, dvalues.shared, strict=True):
        if dvalue is not None:
            total[...] += dvalue.reshape(1, -1)


def _add(totals: Any, addends: Any, j: Array | None = None) -> None:
    """Adds the arrays of a pytree to references, at the index j if it is given."""

    def add(total: Any, addend: Array) -> None:
        if addend.dtype == jax.dtypes.float0:
            return
        addend = addend.astype(total.dtype)
        if j is None:
            total[...] += addend
        else:
            total[j] += addend

    jax.tree.map(add, totals, addends)


def _store(results: Any, sums: Any) -> None:
    """Casts the sums to the dtypes of the results."""

    def store(result: Any, total: Any) -> None:
        result[...] = total[...].astype(result.dtype)

    jax.tree.map(store, results, sums)
