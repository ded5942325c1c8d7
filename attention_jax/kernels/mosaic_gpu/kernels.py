"""The GPU kernels of attention: forward, and a backward pass for the tokens of each side.

A program, of one warpgroup, computes the results of 64 tokens of its own side, and loops over tiles
of 64 tokens of the other side. Arrays are transposed, [features, tokens]: the kernels add up one
feature of a tile of pairs at a time, from a number for each row and a number for each column.

Both backward kernels recompute the logits. The own tokens are the rows of the tile, so that every
gradient is a sum along rows, and each program alone writes the gradients of its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention_jax.kernels.mosaic_gpu.registers import ROWS, Registers, loop
from attention_jax.kernels.mosaic_gpu.weighted_tanh import (
    DENOMINATORS,
    FEATURES_PER_STEP,
    two_inverses,
    two_quotients,
)
from attention_jax.kernels.rows import excess_terms, logit_cotangents, risen_excess

Array = jax.Array

LARGEST_BOX = 256  # rows of one asynchronous copy
_LOWEST = float(jnp.finfo(jnp.float32).min)


class Shared(NamedTuple):
    """What every kernel reads, in the GPU's main memory."""

    weights: Any  # [rows, step] of F features; the row F / step begins with a constant
    small: Any  # int32 [1] which form the features have
    visits: Any  # int32 [tiles, 2] the first tile of the other side that a tile visits, and the end


class Side(NamedTuple):
    """The tokens of one side, in the main memory, or one tile of them in a program's memory."""

    features: Any  # [F, tokens]
    vectors: Any  # [Dv, tokens]: of keys the values, of queries the cotangents of the output
    numbers: Any  # [n, tokens] of queries: see `Numbers`; None for keys and in the forward kernel
    windows: Any  # int32 [2, tokens] of queries: the first visible key, and the end; None for keys


class Numbers:
    """The rows of `Side.numbers`."""

    REFERENCE = 0  # subtracted from the logits; +inf for a row without keys
    OFFSET = 1  # added to the cotangents of the weights
    DENTROPY = 2  # of the entropy; only with statistics


class Program(NamedTuple):
    """The references of a program, in the main memory and, from `own` on, in its own memory."""

    shared: Shared
    own_side: Side
    other_side: Side
    results: Any  # a NamedTuple of arrays [n, tokens] of the own side, or None
    own: Side  # the program's tile
    other: Side
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
        _load(self.other_side, self.other, j, self.of_other)

    def store(self, i: Any) -> None:
        """Copies the results [n, 64] of the tile i into their columns of [n, tokens]."""
        plgpu.commit_smem()
        for source, target in zip(
            *map(jax.tree.leaves, (self.tile_results, self.results)), strict=True
        ):
            for rows in _boxes(source):
                columns = pl.ds(i * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(source.at[rows], target.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)


def copies(side: Side) -> int:
    """The number of asynchronous copies of a tile."""
    return sum(len(_boxes(array)) for array in jax.tree.leaves(side))


def _boxes(array: Any) -> list[Any]:
    """The rows of each asynchronous copy."""
    count = array.shape[0]
    return [pl.ds(first, min(LARGEST_BOX, count - first)) for first in range(0, count, LARGEST_BOX)]


def _load(side: Side, tile: Side, index: Any, barrier: Any) -> None:
    for source, target in zip(*map(jax.tree.leaves, (side, tile)), strict=True):
        for rows in _boxes(source):
            columns = pl.ds(index * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(source.at[rows, columns], target.at[rows], barrier)
    plgpu.barrier_wait(barrier)


# --- parts of both passes ---


def _in_form(small: Any, function: Callable[[Callable], Any]) -> Any:
    """function(denominator), of the form that the features have."""
    forms = (functools.partial(function, DENOMINATORS[form]) for form in (1, 0))
    return lax.cond(small == 1, *forms)


def _tile_logits(registers: Registers, program: Program, denominator: Callable) -> Array:
    """The logits [64, columns] of features own [F, 64] and other [F, columns]."""
    weights = program.weights

    def step(k: Any, logits: Array) -> Array:
        for n in range(0, FEATURES_PER_STEP, 2):
            d1, d2 = _denominators(registers, program, denominator, k * FEATURES_PER_STEP + n)
            logits = logits + two_quotients(
                weights[k, n], weights[k, n + 1], d1, d2, registers.reciprocal
            )
        return logits

    steps = program.own.features.shape[0] // FEATURES_PER_STEP
    return lax.fori_loop(0, steps, step, registers.filled(weights[steps, 0]))


def _denominators(
    registers: Registers, program: Program, denominator: Callable, first: Any
) -> list[Array]:
    """d of a feature and the next one."""
    own, other = program.own.features, program.other.features
    return [
        denominator(registers.rows(own, f), registers.along_columns(other, f))
        for f in (first, first + 1)
    ]


def _masked(logits: Array, window: tuple[Array, Array], keys: Array) -> Array:
    """The logits, -inf where the key's position is outside of the query's window."""
    first, stop = window
    return jnp.where((keys >= first) & (keys < stop), logits, -jnp.inf)


# --- forward ---


class ForwardResults(NamedTuple):
    """In the main memory, or of one tile of queries; the last rows are per query."""

    output: Any  # [Dv, T]
    sums: Any  # [3, T]: largest, total, excess; the third only with statistics


def forward_kernel(registers: Registers, program: Program) -> None:
    """output = sum_j exp(x_j - largest) v_j / total, total = sum_j exp(x_j - largest)"""
    i = lax.axis_index("tile")
    shared, own, other = program.shared, program.own, program.other
    program.start(i)
    small = shared.small[0]
    output, sums = program.tile_results
    value_dim, has_excess = output.shape[0], sums.shape[0] == 3
    _clear(registers, output)

    def visit(j: Any, carry: tuple) -> tuple:
        largest_before, total, excess = carry
        program.load_other(j)
        logits = _in_form(small, functools.partial(_tile_logits, registers, program))
        window = registers.rows(own.windows, 0), registers.rows(own.windows, 1)
        logits = _masked(logits, window, registers.positions(1) + j * ROWS)
        # The lowest float, not -inf, before the first key: -inf minus -inf would be NaN.
        largest = jnp.maximum(largest_before, jnp.max(logits, axis=1))
        shrink = jnp.exp(largest_before - largest)
        shifted = logits - registers.spread(largest)
        terms = jnp.exp(shifted)
        if has_excess:
            excess = risen_excess(shrink, largest_before - largest, total, excess)
            excess = excess + jnp.sum(excess_terms(terms, shifted), axis=1)
        total = shrink * total + jnp.sum(terms, axis=1)

        def add_value(d: Any) -> None:
            weighted = jnp.sum(terms * registers.along_columns(other.vectors, d), axis=1)
            output[d] = registers.row_vector(output, d) * shrink + weighted

        loop(value_dim, add_value)
        return largest, total, excess

    first, end = shared.visits[i, 0], shared.visits[i, 1]
    zeros = registers.row_vector_filled(0)
    carry = registers.row_vector_filled(_LOWEST), zeros, zeros
    largest, total, excess = lax.fori_loop(first, end, visit, carry)
    # A row without keys has output 0.
    scale = jnp.where(total != 0, 1 / jnp.where(total != 0, total, 1.0), 0.0)

    def divide(d: Any) -> None:
        output[d] = registers.row_vector(output, d) * scale

    loop(value_dim, divide)
    for n, row in enumerate((largest, total, excess)[: sums.shape[0]]):
        sums[n] = row
    program.store(i)


# --- backward ---


class BackwardResults(NamedTuple):
    """Sums over the other side with the cotangents g of the logits, in the main memory or a tile's.

    See `weighted_tanh.TokenGradients` for the first two.
    """

    slopes: Any  # [F, tokens]
    inverses: Any  # [F, T] of queries; None for keys
    vectors: Any  # [Dv, S] of keys: the gradients of the values; None for queries


def backward_kernel(own_keys: bool, registers: Registers, program: Program) -> None:
    """The gradients of the tokens of one side: of keys if `own_keys`, else of queries.

    The cotangents of the output are divided by the rows' totals.
    """
    i = lax.axis_index("tile")
    shared, own, other, sums = program.shared, program.own, program.other, program.tile_results
    program.start(i)
    small = shared.small[0]
    of_queries = registers.along_columns if own_keys else registers.rows
    queries = other if own_keys else own
    has_dentropy = queries.numbers.shape[0] == 3
    for ref in jax.tree.leaves(sums):
        _clear(registers, ref)

    def visit(j: Any, carry: None) -> None:
        program.load_other(j)
        logits = _in_form(small, functools.partial(_tile_logits, registers, program))
        keys = registers.positions(0) + i * ROWS if own_keys else registers.positions(1) + j * ROWS
        window = of_queries(queries.windows, 0), of_queries(queries.windows, 1)
        logits = _masked(logits, window, keys)
        shifted = logits - of_queries(queries.numbers, Numbers.REFERENCE)
        terms = jnp.exp(shifted)

        def add_product(d: Any, dweights: Array) -> Array:
            return dweights + registers.rows(own.vectors, d) * registers.along_columns(
                other.vectors, d
            )

        products = lax.fori_loop(0, own.vectors.shape[0], add_product, registers.filled(0.0))
        dweights = products + of_queries(queries.numbers, Numbers.OFFSET)
        dentropy = of_queries(queries.numbers, Numbers.DENTROPY) if has_dentropy else None
        dlogits = logit_cotangents(terms, shifted, dweights, dentropy)

        def add_vector(d: Any) -> None:
            weighted = jnp.sum(terms * registers.along_columns(other.vectors, d), axis=1)
            sums.vectors[d] = registers.row_vector(sums.vectors, d) + weighted

        if own_keys:
            loop(sums.vectors.shape[0], add_vector)
        _in_form(small, functools.partial(_add_slopes, registers, program, dlogits))
        return carry

    lax.fori_loop(shared.visits[i, 0], shared.visits[i, 1], visit, None)
    program.store(i)


def _clear(registers: Registers, ref: Any) -> None:
    def clear_row(n: Any) -> None:
        ref[n] = registers.row_vector_filled(0)

    loop(ref.shape[0], clear_row)


def _add_slopes(
    registers: Registers, program: Program, dlogits: Array, denominator: Callable
) -> None:
    """Adds the sums along rows of g r (1 - r), and of g r for queries."""
    sums = program.tile_results

    def add(total: Any, feature: Any, terms: Array) -> None:
        total[feature] = registers.row_vector(total, feature) + jnp.sum(terms, axis=1)

    def step(k: Any) -> None:
        for n in range(0, FEATURES_PER_STEP, 2):
            first = k * FEATURES_PER_STEP + n
            d1, d2 = _denominators(registers, program, denominator, first)
            for f, inverse in enumerate(two_inverses(d1, d2, registers.reciprocal)):
                weighted = dlogits * inverse
                add(sums.slopes, first + f, weighted - weighted * inverse)
                if sums.inverses is not None:
                    add(sums.inverses, first + f, weighted)

    loop(sums.slopes.shape[0] // FEATURES_PER_STEP, step)
