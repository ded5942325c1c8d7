"""The Pallas TPU kernels of attention: forward, and one backward pass for all gradients.

The grid is (tiles of queries, steps); each step visits one tile of keys. A kernel calls the score's
own `pair` and `pair_vjp` on its tiles, so that it serves every score which Mosaic can lower.

The backward kernel computes each tile's logits and weights once and adds to the gradients of the
queries, the keys and the values. The gradients of all keys stay in VMEM until the last step.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention_jax.core.products import einsum
from attention_jax.experimental.kernel_attention import RowTerms, inverse_totals, tile_cotangents
from attention_jax.experimental.mosaic_tpu.operands import LANES, Blocks, TileProgram, key_tile
from attention_jax.experimental.mosaic_tpu.scores import transposed_product
from attention_jax.normalizers.softmax_rows import LOWEST, SoftmaxSums
from attention_jax.tiles.features import Operands

Array = jax.Array


class TpuTile:
    """One tile in a kernel: the blocks that the grid step reads, and which tile of keys it is."""

    def __init__(self, program: TileProgram, refs: Blocks, j: Array):
        read = functools.partial(jax.tree.map, lambda ref: ref[...])
        self.program, self.refs, self.j = program, refs, j
        self.queries, self.keys, self.values, matrices = read(refs.operands)
        self.params = program.params(matrices)

    def logits(self, masked: bool) -> Array:
        """The logits [t, s], -inf where masked."""
        logits = self.program.score.pair(self.params, self.queries, self.keys).astype(jnp.float32)
        if not masked:
            return logits
        windows = self.refs.windows.map(lambda ref: ref[...].T, lambda ref: ref[...])
        keys = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        allowed = windows.allowed(keys + self.j * logits.shape[1])
        return jnp.where(allowed, logits, -jnp.inf)


def visit_tile(program: TileProgram, refs: Blocks, visit: Callable[[TpuTile, bool], None]) -> None:
    """Calls visit(tile, masked) if the step visits a tile of keys."""
    i, n, schedule = pl.program_id(0), pl.program_id(1), refs.schedule
    tile = functools.partial(TpuTile, program, refs, key_tile(schedule, i, n))
    if schedule is None:
        visit(tile(), False)
        return
    j = schedule.first[i] + n
    full = (schedule.first_full[i] <= j) & (j < schedule.end_full[i])
    pl.when(full)(lambda: visit(tile(), False))
    pl.when(~full & (j < schedule.end[i]))(lambda: visit(tile(), True))


# --- forward ---


class ForwardState(NamedTuple):
    """The online softmax. The largest is the same in all lanes, sums over keys are per lane."""

    sums: SoftmaxSums  # [t, lanes]
    weighted: Any  # [t, Dv]


def forward_kernel(
    program: TileProgram,
    refs: Blocks,
    results: tuple[Any, SoftmaxSums],  # [t, Dv] and [1, t]
    state: ForwardState,
) -> None:
    """output = sum_j exp(x_j - largest) v_j / total, total = sum_j exp(x_j - largest)"""
    n = pl.program_id(1)

    @pl.when(n == 0)
    def _():
        state.sums.largest[...] = jnp.full_like(state.sums.largest, LOWEST)
        _clear((state.sums[1:], state.weighted))

    visit_tile(program, refs, functools.partial(_update, state))

    @pl.when(n == pl.num_programs(1) - 1)
    def _():
        output, rows = results
        largest, *sums = jax.tree.map(lambda ref: ref[...], state.sums)
        sums = jax.tree.map(functools.partial(jnp.sum, axis=1, keepdims=True), sums)
        output[...] = (state.weighted[...] * inverse_totals(sums[0])).astype(output.dtype)
        _store(rows, SoftmaxSums(largest[:, :1].T, *jax.tree.map(jnp.transpose, sums)))


def _update(state: ForwardState, tile: TpuTile, masked: bool) -> None:
    logits = tile.logits(masked)
    before = jax.tree.map(lambda ref: ref[...], state.sums)
    sums, exponentials, shrink = before.with_tile(
        logits,
        jnp.max(logits, axis=1, keepdims=True),
        functools.partial(_repeat, width=logits.shape[1]),
        _sum_per_lane,
    )
    _store(state.sums, sums)
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


class BackwardState(NamedTuple):
    """The scratch memory of the backward kernel."""

    terms: RowTerms  # [t, lanes]
    sums: Operands  # in float32; None where the result, in float32 itself, is the sum


def backward_kernel(
    program: TileProgram,
    refs: Blocks,
    gradients: Operands,  # [t, ...] of queries, [key_tiles, s, ...] of keys and values
    state: BackwardState,
) -> None:
    """The gradients of all operands."""
    i, n = pl.program_id(0), pl.program_id(1)
    first_of_query, last_of_query = n == 0, n == pl.num_programs(1) - 1
    sums = jax.tree.map(
        lambda total, gradient: gradient if total is None else total,
        state.sums,
        gradients,
        is_leaf=lambda leaf: leaf is None,
    )
    queries, *of_example = sums

    @pl.when((i == 0) & first_of_query)
    def _():
        _clear(of_example)

    @pl.when(first_of_query)
    def _():
        _clear(queries)

        def spread(row: Any) -> Array:
            return jnp.broadcast_to(row[...].T, (row.shape[1], LANES))

        _store(state.terms, jax.tree.map(spread, refs.terms))

    visit_tile(program, refs, functools.partial(_add_tile_gradients, state, sums))

    @pl.when(last_of_query)
    def _():
        _store(gradients.queries, queries)

    @pl.when((i == pl.num_programs(0) - 1) & last_of_query)
    def _():
        _store(list(gradients[1:]), of_example)


def _add_tile_gradients(state: BackwardState, sums: Operands, tile: TpuTile, masked: bool) -> None:
    logits, doutput, j = tile.logits(masked), tile.refs.doutput[...], tile.j
    terms = jax.tree.map(lambda column: _repeat(column[...], logits.shape[1]), state.terms)
    products = einsum("td,sd->ts", doutput, tile.values)
    exponentials, dlogits = tile_cotangents(logits, products, terms)
    sums.values[j] += transposed_product(doutput, exponentials)
    dparams, dqueries, dkeys = tile.program.score.pair_vjp(
        tile.params, tile.queries, tile.keys, dlogits
    )
    _add(sums.queries, ..., dqueries)
    _add(sums.keys, j, dkeys)
    _add(sums.params, ..., tile.program.read(dparams))


def _clear(refs: Any) -> None:
    _store(refs, jax.tree.map(jnp.zeros_like, refs))


def _add(totals: Any, index: Any, addends: Any) -> None:
    """Adds the arrays of a pytree to references at an index."""

    def add(total: Any, addend: Array) -> None:
        part = total[index]
        total[index] = part + addend.astype(part.dtype).reshape(part.shape)

    jax.tree.map(add, totals, addends)


def _store(results: Any, sums: Any) -> None:
    """Writes arrays, or what references hold, in the dtypes of the results."""

    def store(result: Any, total: Any) -> None:
        result[...] = total[...].astype(result.dtype)

    jax.tree.map(store, results, sums)
