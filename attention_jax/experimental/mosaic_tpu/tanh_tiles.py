"""Tiles of additive attention in a kernel on a TPU: sum_f v_f tanh(a_if + b_jf).

The unit of the elementary functions computes one tanh of a register (8 x 128 numbers) in a cycle,
and the four vector units meanwhile add and multiply: a + b, v tanh, and the sum are three quarters
of a cycle. By the compiler's count, one tanh for each pair and feature takes fewer cycles than a
quotient of exponentials, which takes five operations of the vector units.

A block of a few rows stays in registers while a loop goes over all features. The whole tile would
not fit: every feature would read and write it. The features of the keys are in memory once for
each row of a register, so that no unit has to repeat them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Array = jax.Array

_HEIGHT, _LANES = 8, 128  # rows and lanes of a register, which divide every tile
_BLOCK = 8 * 8 * 128  # numbers of a block, in 8 of 64 registers
_UNROLLED = 16  # features of a step of the loop of the backward pass


def tanh_tile(v: Array, a: Array, b: Array) -> Array:
    """logits_ij = sum_f v_f tanh(a_if + b_jf): (v [A], a [t, A], b [s, A]) -> [t, s]"""
    return functools.reduce(jnp.add, (_tanh_part(*part) for part in _by_lanes(v, a, b)))


def _tanh_part(v: Array, a: Array, b: Array) -> Array:
    (t, features), s = a.shape, b.shape[0]
    rows = _block_rows(_BLOCK // s)

    def body(v_ref, a_ref, b_ref, result_ref):
        v_ref[...] = jnp.broadcast_to(v.reshape(1, features).T, v_ref.shape)
        a_ref[...] = a
        _repeat_rows(b.T, b_ref)

        def add_block(block, carry):
            at = _block(block, rows)
            x = a_ref[at, :]
            total = jnp.zeros((rows, s), jnp.float32)
            for f in range(features):
                h = jnp.tanh(x[:, f : f + 1] + _enlarged(b_ref[f], rows, s))
                total += _enlarged(v_ref[f : f + 1, :], 1, s) * h
            result_ref[at, :] = total
            return carry

        jax.lax.fori_loop(0, t // rows, add_block, 0)
        return result_ref[...]

    shapes = (features, _LANES), (t, features), (features, _HEIGHT, s), (t, s)
    return pl.run_scoped(body, *map(_scratch, shapes))


# With h = tanh(a_if + b_jf) and a cotangent d_ij,
#     dv_f = sum_ij d_ij h,
#     da_if = v_f sum_j d_ij (1 - h^2),    db_jf = v_f sum_i d_ij (1 - h^2).
# d h and d (1 - h^2) = d - (d h) h take three operations. An exchange between the lanes of a
# register takes another unit, and longer. It is done for all features before the loop (a_if to all
# _LANES) and after it (the sums over j): in between, sums are kept per lane and per row.
def tanh_tile_vjp(v: Array, a: Array, b: Array, dlogits: Array) -> tuple[Array, Array, Array]:
    """Pulls `dlogits` [t, s] back through `tanh_tile`: (dv [A], da [t, A], db [s, A])"""
    parts = [_tanh_part_vjp(*part, dlogits) for part in _by_lanes(v, a, b)]
    dv, da, db = (jnp.concatenate(gradients, axis=-1) for gradients in zip(*parts, strict=True))
    return dv, da, db


def _tanh_part_vjp(v: Array, a: Array, b: Array, dlogits: Array) -> tuple[Array, Array, Array]:
    (t, features), s = a.shape, b.shape[0]
    width = 256 if s % 256 == 0 else _LANES
    rows = _block_rows(_BLOCK // width)

    def body(a_ref, x_ref, b_ref, d_ref, da_ref, row_sums_ref, db_ref, dv_ref):
        a_ref[...] = a
        d_ref[...] = dlogits
        _repeat_rows(b.T, b_ref)
        db_ref[...] = jnp.zeros_like(db_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

        def add_block(block, carry):
            at = _block(block, rows)
            x = a_ref[at, :]
            for f in range(features):
                x_ref[f] = jnp.broadcast_to(x[:, f : f + 1], (rows, _LANES))
            for first in range(0, s, width):
                columns = pl.ds(first, width)
                add_features(columns, d_ref[at, columns], is_first=first == 0)
            for f in range(features):
                da_ref[at, f : f + 1] = jnp.sum(row_sums_ref[f], axis=1, keepdims=True)
            return carry

        def add_features(columns, d, *, is_first):
            def add_feature(f, carry):
                h = jnp.tanh(
                    _enlarged(x_ref[f], rows, width) + _enlarged(b_ref[f, :, columns], rows, width)
                )
                product = d * h
                slope = d - product * h
                dv_ref[f] += _fold(_fold(product, _HEIGHT, 0), _LANES, 1)
                db_ref[f, :, columns] += _fold(slope, _HEIGHT, 0)
                row_sums = _fold(slope, _LANES, 1)
                row_sums_ref[f] = row_sums if is_first else row_sums_ref[f] + row_sums
                return carry

            unroll = math.gcd(features, _UNROLLED)
            jax.lax.fori_loop(0, features, add_feature, 0, unroll=unroll)

        jax.lax.fori_loop(0, t // rows, add_block, 0)
        return jnp.sum(dv_ref[...], axis=(1, 2)), da_ref[...], jnp.sum(db_ref[...], axis=1).T

    per_row, per_key = (features, rows, _LANES), (features, _HEIGHT, s)
    shapes = ((t, features), per_row, per_key, (t, s))
    sums = ((t, features), per_row, per_key, (features, _HEIGHT, _LANES))
    dv, da, db = pl.run_scoped(body, *map(_scratch, (*shapes, *sums)))
    return dv, v[None, :] * da, v[None, :] * db


def _by_lanes(v: Array, a: Array, b: Array) -> list[tuple[Array, Array, Array]]:
    """Parts of at most 128 features: the memory that a part takes is free for the next."""
    width = _LANES
    parts = (slice(first, first + width) for first in range(0, v.shape[0], width))
    return [(v[part], a[:, part], b[:, part]) for part in parts]


def _block_rows(most: int) -> int:
    """The number of rows of a block, which divides a tile's."""
    return next((rows for rows in (64, 32, 16) if rows <= most), _HEIGHT)


def _block(block: Array, rows: int) -> Any:
    return pl.ds(pl.multiple_of(block * rows, rows), rows)


def _scratch(shape: tuple[int, ...]) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _repeat_rows(rows: Array, repeated: Any) -> None:
    """Writes each row of [n, s] to all rows of its part of [n, height, s]."""
    for n in range(rows.shape[0]):
        repeated[n] = jnp.broadcast_to(rows[n : n + 1, :], repeated.shape[1:])


def _enlarged(part: Array, rows: int, columns: int) -> Array:
    """Repeats a part of a block, all of its rows and columns if it is one row or column."""
    height, width = part.shape
    return jnp.tile(part, (rows // height if height > 1 else 1, columns // width))


def _fold(terms: Array, size: int, axis: int) -> Array:
    """The sum of all parts of `size` along an axis; it adds whole registers only."""
    parts = range(0, terms.shape[axis], size)
    return functools.reduce(
        jnp.add, (jax.lax.slice_in_dim(terms, n, n + size, axis=axis) for n in parts)
    )
