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
    LANES,
    Blocks,
    Program,
    Schedule,
    key_tile,
)
from attention_jax.kernels.mosaic_tpu.scores import transposed_product
from attention_jax.kernels.rows import (
    RowTerms,
    Sums,
    excess_terms,
    logit_cotangents,
    risen_excess,
)

Array = jax.Array


class Tile:
    """One tile in a kernel: the blocks that the grid step reads, and which tile of keys it is."""

    def __init__(self, program: Program, refs: Blocks, j: Array):
        read = functools.partial(jax.tree.map, lambda ref: ref[...])
        self.program, self.refs, self.j = program, refs, j
        self.queries, self.keys, self.values = read((refs.queries, refs.keys, refs.values))
        self.params = program.params([ref[...] for ref in refs.params])

    def logits(self, masked: bool) -> Array:
        """The logits [t, s], -inf where masked."""
        logits = self.program.score.pair(self.params, self.queries, self.keys).astype(jnp.float32)
        if not masked:
            return logits
        windows = self.refs.windows.map(lambda ref: ref[...].T, lambda ref: ref[...])
        keys = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        allowed = windows.allowed(keys + self.j * logits.shape[1])
        return jnp.where(allowed, logits, -jnp.inf)


def visit_tile(
    program: Program, schedule: Schedule | None, refs: Blocks, visit: Callable[[Tile, bool], None]
) -> None:
    """Calls visit(tile, masked) if the step visits a tile of keys."""
    i, n = pl.program_id(0), pl.program_id(1)
    tile = functools.partial(Tile, program, refs, key_tile(schedule, i, n))
    if schedule is None:
        visit(tile(), False)
        return
    j = schedule.first[i] + n
    full = (schedule.first_full[i] <= j) & (j < schedule.end_full[i])
    pl.when(full)(lambda: visit(tile(), False))
    pl.when(~full & (j < schedule.end[i]))(lambda: visit(tile(), True))


# --- forward ---


class ForwardState(NamedTuple):
    """The online softmax of `normalizers.rows`; sums over keys are kept per lane."""

    largest: Any  # [t, lanes], the same in all lanes
    total: Any  # [t, lanes]
    weighted: Any  # [t, Dv]
    excess: Any  # [t, lanes]; None without statistics


def forward_kernel(
    program: Program,
    schedule: Schedule | None,
    refs: Blocks,
    output: Any,  # [t, Dv]
    sums: Sums,  # [1, t]
    state: ForwardState,
) -> None:
    """output = sum_j exp(x_j - largest) v_j / total, total = sum_j exp(x_j - largest)"""
    n = pl.program_id(1)

    @pl.when(n == 0)
    def _():
        # The lowest float: a masked logit, -inf, minus -inf would be NaN.
        state.largest[...] = jnp.full_like(state.largest, jnp.finfo(jnp.float32).min)
        _clear((state.total, state.weighted, state.excess))

    visit_tile(program, schedule, refs, functools.partial(_update, state))

    @pl.when(n == pl.num_programs(1) - 1)
    def _():
        total = jnp.sum(state.total[...], axis=1, keepdims=True)
        has_keys = total != 0  # `> 0` would hide a NaN
        scale = 1 / jnp.where(has_keys, total, 1)
        output[...] = jnp.where(has_keys, state.weighted[...] * scale, 0).astype(output.dtype)
        sums.largest[...] = state.largest[:, :1].T
        sums.total[...] = total.T
        if sums.excess is not None:
            sums.excess[...] = jnp.sum(state.excess[...], axis=1, keepdims=True).T


def _update(state: ForwardState, tile: Tile, masked: bool) -> None:
    logits = tile.logits(masked)
    previous = state.largest[...]
    largest = jnp.maximum(previous, jnp.max(logits, axis=1, keepdims=True))
    shrink = jnp.exp(previous - largest)
    shifted = logits - _repeat(largest, logits.shape[1])
    exponentials = jnp.exp(shifted)
    if state.excess is not None:
        excess = risen_excess(shrink, previous - largest, state.total[...], state.excess[...])
        terms = excess_terms(exponentials, shifted)
        state.excess[...] = excess + _sum_per_lane(terms)
    state.largest[...] = largest
    state.total[...] = shrink * state.total[...] + _sum_per_lane(exponentials)
    weighted = einsum("ts,sd->td", exponentials, tile.values)
    state.weighted[...] = _repeat(shrink, weighted.shape[1]) * state.weighted[...] + weighted


def _repeat(per_lane: Array, width: int) -> Array:
    """[t, lanes], the same in all lanes -> [t, width], or [t, 1]"""
    if width % LANES:
        return per_lane[:, :1]
    return per_lane if width == LANES else jnp.tile(per_lane, (1, width // LANES))


def _sum_per_lane(terms: Array) -> Array:
    """[t, s] -> [t, lanes]: sums of every lanes-th column, which need no exchange between lanes"""
    parts = [terms[:, first : first + LANES] for first in range(0, terms.shape[1], LANES)]
    return functools.reduce(jnp.add, parts)


# --- backward ---


class Gradients(NamedTuple):
    """What the backward kernel writes."""

    queries: Any  # [t, ...] of each array of features
    keys: Any  # [key_tiles, s, ...] of each array of features
    values: Any  # [key_tiles, s, Dv]
    params: list[Any]  # of the matrices


class BackwardState(NamedTuple):
    """The scratch memory of the backward kernel."""

    doutput: Any  # [t, Dv] divided by the rows' totals, 0 for rows without keys
    terms: RowTerms  # [t, lanes]; no scale
    sums: Gradients  # in float32, the shapes of the results


def backward_kernel(
    program: Program,
    schedule: Schedule | None,
    refs: Blocks,
    terms: RowTerms,  # [1, t]
    doutput: Any,  # [t, Dv]
    gradients: Gradients,
    state: BackwardState,
) -> None:
    """The gradients of all operands."""
    i, n = pl.program_id(0), pl.program_id(1)
    first_of_query, last_of_query = n == 0, n == pl.num_programs(1) - 1
    queries, *of_example = state.sums

    @pl.when((i == 0) & first_of_query)
    def _():
        _clear(of_example)

    @pl.when(first_of_query)
    def _():
        _clear(queries)
        scale = terms.scale[...].T
        # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
        scaled = jnp.where(scale != 0, doutput[...].astype(jnp.float32) * scale, 0)
        state.doutput[...] = scaled.astype(state.doutput.dtype)
        for column, row in zip(state.terms, terms, strict=True):
            if column is not None:
                column[...] = jnp.broadcast_to(row[...].T, column.shape)

    visit_tile(program, schedule, refs, functools.partial(_add_gradients, state))

    @pl.when(last_of_query)
    def _():
        _store(gradients.queries, queries)

    @pl.when((i == pl.num_programs(0) - 1) & last_of_query)
    def _():
        _store(list(gradients[1:]), of_example)


def _add_gradients(state: BackwardState, tile: Tile, masked: bool) -> None:
    logits, doutput = tile.logits(masked), state.doutput[...]
    sums, j = state.sums, tile.j
    terms = jax.tree.map(lambda column: _repeat(column[...], logits.shape[1]), state.terms)
    shifted = logits - terms.reference
    weights = jnp.exp(shifted)
    dweights = einsum("td,sd->ts", doutput, tile.values) + terms.offset
    dlogits = logit_cotangents(weights, shifted, dweights, terms.dentropy)
    sums.values[j] += transposed_product(doutput, weights)
    dparams, dqueries, dkeys = tile.program.score.pair_vjp(
        tile.params, tile.queries, tile.keys, dlogits
    )
    _add(sums.queries, ..., dqueries)
    _add(sums.keys, j, dkeys)
    leaves = jax.tree.leaves(dparams)
    _add(sums.params, ..., [leaves[index] for index in tile.program.params_read])


def _clear(refs: Any) -> None:
    for ref in jax.tree.leaves(refs):
        ref[...] = jnp.zeros_like(ref)


def _add(totals: Any, index: Any, addends: Any) -> None:
    """Adds the arrays of a pytree to references at an index."""

    def add(total: Any, addend: Array) -> None:
        part = total[index]
        total[index] = part + addend.astype(part.dtype).reshape(part.shape)

    jax.tree.map(add, totals, addends)


def _store(results: Any, sums: Any) -> None:
    """Casts the sums to the dtypes of the results."""

    def store(result: Any, total: Any) -> None:
        result[...] = total[...].astype(result.dtype)

    jax.tree.map(store, results, sums)
