"""The GPU kernels of attention: forward, and a backward pass for the tokens of each side.

A program, of one warpgroup, computes the results of 64 tokens of its own side, and loops over tiles
of 64 tokens of the other side. Arrays are transposed, [features, tokens]: the kernels add up one
feature of a tile of pairs at a time, from a number for each row and a number for each column.

Both backward kernels recompute the logits. The own tokens are the rows of the tile, so that every
gradient is a sum along rows, and each program alone writes the gradients of its tokens.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention_jax.experimental.kernel_attention import RowTerms, inverse_totals, tile_cotangents
from attention_jax.experimental.mosaic_gpu.registers import ROWS, Registers, loop
from attention_jax.experimental.mosaic_gpu.tanh_quotients import (
    DENOMINATORS,
    FEATURES_PER_STEP,
    two_inverses,
    two_quotients,
)
from attention_jax.normalizers.softmax_rows import LOWEST, SoftmaxSums

Array = jax.Array

LARGEST_BOX = 256  # rows of one asynchronous copy


class KernelInputs(NamedTuple):
    """What every kernel reads, in the GPU's main memory."""

    weights: Any  # [rows, step] of F features; the row F / step begins with a constant
    small: Any  # int32 [1] which form the features have
    visits: Any  # int32 [tiles, 2] the first tile of the other side that a tile visits, and the end


class SideArrays(NamedTuple):
    """The tokens of one side, in the main memory, or one tile of them in a program's memory."""

    features: Any  # [F, tokens]
    vectors: Any  # [Dv, tokens]: of keys the values, of queries the cotangents of the output
    numbers: Any  # [n, tokens] of queries: the `RowTerms`; None for keys and in the forward kernel
    windows: Any  # int32 [2, tokens] of queries: the first visible key, and the end; None for keys


class ProgramRefs(NamedTuple):
    """The references of a program, in the main memory and, from `own` on, in its own memory."""

    shared: KernelInputs
    own_side: SideArrays
    other_side: SideArrays
    results: Any  # a NamedTuple of arrays [n, tokens] of the own side, or None
    own: SideArrays  # the program's tile
    other: SideArrays
    tile_results: Any
    weights: Any
    of_weights: Any  # barriers of the copies
    of_own: Any
    of_other: Any

    def start(self, i: Any) -> None:
        """Copies the weights of the features and the own tile, and waits."""
        plgpu.copy_gmem_to_smem(self.shared.weights, self.weights, self.of_weights)
        plgpu.barrier_wait(self.of_weights)
        _load(self.own_side, self.own, i, self.of_own)

    def load_other(self, j: Any) -> None:
        """Copies the tile j of the other side, and waits."""
        plgpu.commit_smem()  # all warps have read the tile before, which the copy overwrites
        _load(self.other_side, self.other, j, self.of_other)

    def store(self, i: Any) -> None:
        """Copies the results [n, 64] of the tile i into their columns of [n, tokens]."""
        plgpu.commit_smem()
        for part, tile in _copies_of(self.results, self.tile_results, i):
            plgpu.copy_smem_to_gmem(tile, part)
        plgpu.wait_smem_to_gmem(0)


def copies(side: SideArrays) -> int:
    """The number of asynchronous copies of a tile."""
    return sum(len(_boxes(array)) for array in jax.tree.leaves(side))


def _boxes(array: Any) -> list[Any]:
    """The rows of each asynchronous copy."""
    count = array.shape[0]
    return [pl.ds(first, min(LARGEST_BOX, count - first)) for first in range(0, count, LARGEST_BOX)]


def _copies_of(arrays: Any, tiles: Any, index: Any) -> Iterator[tuple[Any, Any]]:
    """The two ends of each asynchronous copy between the columns of arrays and their tiles."""
    for array, tile in zip(*map(jax.tree.leaves, (arrays, tiles)), strict=True):
        for rows in _boxes(tile):
            yield array.at[rows, pl.ds(index * ROWS, ROWS)], tile.at[rows]


def _load(side: SideArrays, tile: SideArrays, index: Any, barrier: Any) -> None:
    for part, of_tile in _copies_of(side, tile, index):
        plgpu.copy_gmem_to_smem(part, of_tile, barrier)
    plgpu.barrier_wait(barrier)


# --- parts of both passes ---


def _in_form(small: Any, function: Callable[[Callable], Any]) -> Any:
    """function(denominator), of the form that the features have."""
    forms = (functools.partial(function, DENOMINATORS[form]) for form in (1, 0))
    return lax.cond(small == 1, *forms)


def _tile_logits(
    registers: Registers, program: ProgramRefs, small: Any, own_keys: bool, i: Any, j: Any
) -> Array:
    """The logits of the own tile i and the other tile j, -inf outside of the queries' windows."""
    weights = program.weights
    steps = program.own.features.shape[0] // FEATURES_PER_STEP

    def of_form(denominator: Callable) -> Array:
        def step(k: Any, logits: Array) -> Array:
            for n, _, d1, d2 in _denominators(registers, program, denominator, k):
                logits = logits + two_quotients(
                    weights[k, n], weights[k, n + 1], d1, d2, registers.reciprocal
                )
            return logits

        return lax.fori_loop(0, steps, step, registers.filled(weights[steps, 0]))

    logits = _in_form(small, of_form)
    keys = registers.positions(0) + i * ROWS if own_keys else registers.positions(1) + j * ROWS
    of_queries, queries = _queries(registers, program, own_keys)
    first, stop = of_queries(queries.windows, 0), of_queries(queries.windows, 1)
    return jnp.where((keys >= first) & (keys < stop), logits, -jnp.inf)


def _queries(registers: Registers, program: ProgramRefs, own_keys: bool) -> tuple[Any, SideArrays]:
    """How a number of each query is spread to the tile of pairs, and the tile of queries."""
    if own_keys:
        return registers.along_columns, program.other
    return registers.rows, program.own


def _denominators(
    registers: Registers, program: ProgramRefs, denominator: Callable, k: Any
) -> Iterator[tuple[int, tuple[Any, Any], Array, Array]]:
    """(n, the features n and n + 1 of step k, d of the first and of the second), of each two."""
    own, other = program.own.features, program.other.features
    for n in range(0, FEATURES_PER_STEP, 2):
        first = k * FEATURES_PER_STEP + n
        features = first, first + 1
        d1, d2 = (
            denominator(registers.rows(own, f), registers.along_columns(other, f)) for f in features
        )
        yield n, features, d1, d2


# --- forward ---


def forward_kernel(registers: Registers, program: ProgramRefs) -> None:
    """output = sum_j exp(x_j - largest) v_j / total, total = sum_j exp(x_j - largest)

    The results are the output [Dv, T] and the rows of `SoftmaxSums`: [3, T], or [2, T] without
    statistics.
    """
    i = lax.axis_index("tile")
    program.start(i)
    small = program.shared.small[0]
    output, sums = program.tile_results
    _clear_rows(registers, output)

    def visit(j: Any, before: SoftmaxSums) -> SoftmaxSums:
        program.load_other(j)
        logits = _tile_logits(registers, program, small, False, i, j)
        after, terms, shrink = before.with_tile(
            logits,
            jnp.max(logits, axis=1),
            registers.spread,
            functools.partial(jnp.sum, axis=1),
        )

        def add_value(d: Any) -> None:
            values = registers.along_columns(program.other.vectors, d)
            output[d] = registers.row_vector(output, d) * shrink + jnp.sum(terms * values, axis=1)

        loop(output.shape[0], add_value)
        return after

    zeros = registers.row_vector_filled(0)
    moment = zeros if sums.shape[0] == 3 else None
    empty = SoftmaxSums(registers.row_vector_filled(LOWEST), zeros, moment)
    visits = program.shared.visits
    of_rows = lax.fori_loop(visits[i, 0], visits[i, 1], visit, empty)
    scale = inverse_totals(of_rows.total)

    def divide(d: Any) -> None:
        output[d] = registers.row_vector(output, d) * scale

    loop(output.shape[0], divide)
    for n, row in enumerate(jax.tree.leaves(of_rows)):
        sums[n] = row
    program.store(i)


# --- backward ---


class BackwardResults(NamedTuple):
    """Sums over the other side with the cotangents g of the logits, in the main memory or a tile's.

    See `tanh_quotients.pull_back_sums` for the first two.
    """

    slopes: Any  # [F, tokens]
    inverses: Any  # [F, T] of queries; None for keys
    vectors: Any  # [Dv, S] of keys: the gradients of the values; None for queries


def backward_kernel(own_keys: bool, registers: Registers, program: ProgramRefs) -> None:
    """The gradients of the tokens of one side: of keys if `own_keys`, else of queries.

    The cotangents of the output are divided by the rows' totals.
    """
    i = lax.axis_index("tile")
    own, other, sums = program.own, program.other, program.tile_results
    program.start(i)
    small = program.shared.small[0]
    of_queries, queries = _queries(registers, program, own_keys)
    for ref in jax.tree.leaves(sums):
        _clear_rows(registers, ref)

    def visit(j: Any, carry: None) -> None:
        program.load_other(j)
        logits = _tile_logits(registers, program, small, own_keys, i, j)

        def add_product(d: Any, products: Array) -> Array:
            others = registers.along_columns(other.vectors, d)
            return products + registers.rows(own.vectors, d) * others

        products = lax.fori_loop(0, own.vectors.shape[0], add_product, registers.filled(0.0))
        rows = [of_queries(queries.numbers, n) for n in range(queries.numbers.shape[0])]
        terms, dlogits = tile_cotangents(logits, products, RowTerms(*rows))

        def add_vector(d: Any) -> None:
            weighted = jnp.sum(terms * registers.along_columns(other.vectors, d), axis=1)
            sums.vectors[d] = registers.row_vector(sums.vectors, d) + weighted

        if own_keys:
            loop(sums.vectors.shape[0], add_vector)
        _in_form(small, functools.partial(_add_slopes, registers, program, dlogits))
        return carry

    lax.fori_loop(program.shared.visits[i, 0], program.shared.visits[i, 1], visit, None)
    program.store(i)


def _clear_rows(registers: Registers, ref: Any) -> None:
    def clear_row(n: Any) -> None:
        ref[n] = registers.row_vector_filled(0)

    loop(ref.shape[0], clear_row)


def _add_slopes(
    registers: Registers, program: ProgramRefs, dlogits: Array, denominator: Callable
) -> None:
    """Adds the sums along rows of g r (1 - r), and of g r for queries."""
    sums = program.tile_results

    def add(total: Any, feature: Any, terms: Array) -> None:
        total[feature] = registers.row_vector(total, feature) + jnp.sum(terms, axis=1)

    def step(k: Any) -> None:
        for _, features, d1, d2 in _denominators(registers, program, denominator, k):
            inverses = two_inverses(d1, d2, registers.reciprocal)
            for f, inverse in zip(features, inverses, strict=True):
                weighted = dlogits * inverse
                add(sums.slopes, f, weighted - weighted * inverse)
                if sums.inverses is not None:
                    add(sums.inverses, f, weighted)

    loop(sums.slopes.shape[0] // FEATURES_PER_STEP, step)
