"""The GPU kernels of attention: forward, and a backward pass for the tokens of each side.

A program, of one warpgroup, computes the results of 64 tokens of its own side, and loops over tiles
of 64 tokens of the other side. Arrays are transposed, [features, tokens]: the kernels add up one
feature of a tile of pairs at a time, from a number for each row and a number for each column.

Both backward kernels recompute the logits. The own tokens are the rows of the tile, so that every
gradient is a sum along rows, and each program alone writes the gradients of its tokens.
"""

from __future__ import annotations

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


# --- copies ---


def copies(side: Side, parts: tuple[str, ...]) -> int:
    """The number of asynchronous copies that `load` starts for these parts of a tile."""
    shapes = (getattr(side, part).shape for part in parts if getattr(side, part) is not None)
    return sum(-(-shape[0] // LARGEST_BOX) for shape in shapes)


def load(side: Side, tile: Side, index: Any, parts: tuple[str, ...], barrier: Any) -> None:
    """Copies the tile `index` of these parts of a side, and waits."""
    for part in parts:
        source, target = getattr(side, part), getattr(tile, part)
        if source is None:
            continue
        count = source.shape[0]
        for first in range(0, count, LARGEST_BOX):
            rows = pl.ds(first, min(LARGEST_BOX, count - first))
            columns = pl.ds(index * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(source.at[rows, columns], target.at[rows], barrier)
    plgpu.barrier_wait(barrier)


def load_weights(weights: Any, target: Any, barrier: Any) -> None:
    """Copies the weights of the features, and waits."""
    plgpu.copy_gmem_to_smem(weights, target, barrier)
    plgpu.barrier_wait(barrier)


def store(results: list[tuple[Any, Any]], index: Any) -> None:
    """Copies results [n, 64] into the columns of tile `index` of arrays [n, tokens]."""
    plgpu.commit_smem()
    for source, target in results:
        count = source.shape[0]
        for first in range(0, count, LARGEST_BOX):
            rows = pl.ds(first, min(LARGEST_BOX, count - first))
            plgpu.copy_smem_to_gmem(source.at[rows], target.at[rows, pl.ds(index * ROWS, ROWS)])
    plgpu.wait_smem_to_gmem(0)


# --- parts of both passes ---


def tile_logits(registers: Registers, small: Any, weights: Any, own: Any, other: Any) -> Array:
    """The logits [64, columns] of features own [F, 64] and other [F, columns]."""

    def in_form(denominator: Callable) -> Callable[[], Array]:
        def step(k: Any, logits: Array) -> Array:
            for n in range(0, FEATURES_PER_STEP, 2):
                d1, d2 = _denominators(registers, denominator, own, other, k, n)
                quotients = two_quotients(
                    weights[k, n], weights[k, n + 1], d1, d2, registers.reciprocal
                )
                logits = logits + quotients
            return logits

        steps = own.shape[0] // FEATURES_PER_STEP
        return lambda: lax.fori_loop(0, steps, step, registers.filled(weights[steps, 0]))

    return lax.cond(small == 1, *(in_form(DENOMINATORS[form]) for form in (1, 0)))


def _denominators(
    registers: Registers, denominator: Callable, own: Any, other: Any, k: Any, n: int
) -> list[Array]:
    """d of the features n and n + 1 of step k."""
    first = k * FEATURES_PER_STEP + n
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


def forward_kernel(
    interpreted: bool,
    shared: Shared,
    queries: Side,
    keys: Side,
    results: ForwardResults,
    own: Side,
    other: Side,
    weights: Any,
    tile_results: ForwardResults,
    barriers: tuple[Any, Any, Any],
) -> None:
    """output = sum_j exp(x_j - largest) v_j / total, total = sum_j exp(x_j - largest)"""
    i = lax.axis_index("tile")
    registers = Registers(ROWS, interpreted)
    of_weights, of_own, of_other = barriers
    load_weights(shared.weights, weights, of_weights)
    load(queries, own, i, ("features", "windows"), of_own)
    small = shared.small[0]
    output, sums = tile_results
    value_dim = output.shape[0]
    has_excess = sums.shape[0] == 3

    def clear(d: Any) -> None:
        output[d] = registers.row_vector_filled(0)

    loop(value_dim, clear)

    def visit(j: Any, carry: tuple) -> tuple:
        largest_before, total, excess = carry
        load(keys, other, j, ("features", "vectors"), of_other)
        logits = tile_logits(registers, small, weights, own.features, other.features)
        window = registers.rows(own.windows, 0), registers.rows(own.windows, 1)
        logits = _masked(logits, window, registers.positions(1) + j * ROWS)
        # The lowest float, not -inf, before the first key: -inf minus -inf would be NaN.
        largest = jnp.maximum(largest_before, jnp.max(logits, axis=1))
        shrink = jnp.exp(largest_before - largest)
        shifted = logits - registers.spread(largest)
        terms = jnp.exp(shifted)
        if has_excess:
            # A term with weight 0 is 0: 0 * -inf would be NaN.
            drop = jnp.where(shrink > 0, largest_before - largest, 0.0)
            excess = shrink * (excess + drop * total)
            excess = excess + jnp.sum(terms * jnp.where(terms > 0, shifted, 0.0), axis=1)
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
    store(list(zip(tile_results, results, strict=True)), i)


# --- backward ---


class BackwardResults(NamedTuple):
    """Sums over the other side with the cotangents g of the logits, in the main memory or a tile's.

    See `weighted_tanh.TokenGradients` for the first two.
    """

    slopes: Any  # [F, tokens]
    inverses: Any  # [F, T] of queries; None for keys
    vectors: Any  # [Dv, S] of keys: the gradients of the values; None for queries


# With x the logits, w = exp(x - reference) and the rows' terms divided by the divisor,
#     dw_j = dO . v_j + offset - dentropy (x_j - reference),    dx_j = w_j dw_j,
# as in `tiled`, which derives it. dO is divided by the divisor, so that dv_j = sum_i w_ij dO_i.
def backward_kernel(
    own_keys: bool,
    interpreted: bool,
    shared: Shared,
    own_side: Side,
    other_side: Side,
    results: BackwardResults,
    own: Side,
    other: Side,
    weights: Any,
    tile_results: BackwardResults,
    barriers: tuple[Any, Any, Any],
) -> None:
    """The gradients of the tokens of one side: of keys if `own_keys`, else of queries."""
    i = lax.axis_index("tile")
    registers = Registers(ROWS, interpreted)
    of_weights, of_own, of_other = barriers
    load_weights(shared.weights, weights, of_weights)
    parts = ("features", "vectors", "numbers", "windows")
    load(own_side, own, i, parts, of_own)
    small = shared.small[0]
    of_queries = registers.along_columns if own_keys else registers.rows
    queries = other if own_keys else own
    has_dentropy = queries.numbers.shape[0] == 3

    def clear(ref: Any) -> None:
        def clear_row(n: Any) -> None:
            ref[n] = registers.row_vector_filled(0)

        loop(ref.shape[0], clear_row)

    for ref in tile_results:
        if ref is not None:
            clear(ref)

    def visit(j: Any, carry: None) -> None:
        load(other_side, other, j, parts, of_other)
        logits = tile_logits(registers, small, weights, own.features, other.features)
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
        if has_dentropy:
            # A term with weight 0 is 0: 0 * -inf would be NaN.
            finite = jnp.where(terms > 0, shifted, 0.0)
            dweights = dweights - of_queries(queries.numbers, Numbers.DENTROPY) * finite
        dlogits = terms * dweights
        if own_keys:
            _add_vectors(registers, terms, other.vectors, tile_results.vectors)
        lax.cond(
            small == 1,
            *(
                lambda form=form: _add_slopes(
                    registers, DENOMINATORS[form], own, other, dlogits, tile_results
                )
                for form in (1, 0)
            ),
        )
        return carry

    lax.fori_loop(shared.visits[i, 0], shared.visits[i, 1], visit, None)
    pairs = zip(tile_results, results, strict=True)
    store([(source, target) for source, target in pairs if source is not None], i)


def _add_vectors(registers: Registers, terms: Array, vectors: Any, sums: Any) -> None:
    """sums[d] += sum over columns of terms * vectors[d]"""

    def add(d: Any) -> None:
        weighted = jnp.sum(terms * registers.along_columns(vectors, d), axis=1)
        sums[d] = registers.row_vector(sums, d) + weighted

    loop(sums.shape[0], add)


def _add_slopes(
    registers: Registers,
    denominator: Callable,
    own: Side,
    other: Side,
    dlogits: Array,
    sums: BackwardResults,
) -> None:
    """Adds the sums along rows of g r (1 - r), and of g r for queries."""

    def step(k: Any) -> None:
        for n in range(0, FEATURES_PER_STEP, 2):
            d1, d2 = _denominators(registers, denominator, own.features, other.features, k, n)
            for f, inverse in enumerate(two_inverses(d1, d2, registers.reciprocal)):
                feature = k * FEATURES_PER_STEP + n + f
                weighted = dlogits * inverse
                slopes = jnp.sum(weighted - weighted * inverse, axis=1)
                sums.slopes[feature] = registers.row_vector(sums.slopes, feature) + slopes
                if sums.inverses is not None:
                    inverses = jnp.sum(weighted, axis=1)
                    sums.inverses[feature] = registers.row_vector(sums.inverses, feature) + inverses

    loop(sums.slopes.shape[0] // FEATURES_PER_STEP, step)
