"""Tiles of additive attention in a kernel on a TPU: sum_f v_f tanh(a_if + b_jf).

The unit of the elementary functions computes one tanh of a register (8 x 128 numbers) in a cycle,
and the four vector units meanwhile add and multiply: a + b, v tanh, and the sum are three quarters
of a cycle. By the compiler's count, one tanh for each pair and feature takes fewer cycles than a
quotient of exponentials, which takes five operations of the vector units.

A block of a few rows stays in registers while a loop without branches goes over all features. The
whole tile would not fit: every feature would read and write it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention_jax.scores.contract import Params, Score

Array = jax.Array

_BLOCK = 16 * 8 * 128  # numbers of a block of rows, in 16 of 64 registers
_LANES = 128


@dataclasses.dataclass(frozen=True)
class AdditiveOnTpu(Score):
    """The tiles of `Additive` on a TPU."""

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return weighted_tanh(params["v"], q_features, k_features)

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        dv, dq_features, dk_features = weighted_tanh_vjp(
            params["v"], q_features, k_features, dlogits
        )
        return {**params, "v": dv}, dq_features, dk_features


def weighted_tanh(v: Array, a: Array, b: Array) -> Array:
    """logits_ij = sum_f v_f tanh(a_if + b_jf): (v [A], a [t, A], b [s, A]) -> [t, s]"""
    (t, features), s = a.shape, b.shape[0]
    rows = _rows(t, s)

    def body(v_ref, a_ref, b_ref, result_ref):
        v_ref[...] = jnp.broadcast_to(v.reshape(1, features).T, v_ref.shape)
        a_ref[...] = a
        b_ref[...] = b.T

        def add_block(block, carry):
            at = _block(block, rows)
            x = a_ref[at, :]
            total = jnp.zeros((rows, s), jnp.float32)
            for f in range(features):
                h = jnp.tanh(x[:, f : f + 1] + b_ref[f : f + 1, :])
                total += jnp.tile(v_ref[f : f + 1, :], (1, s // v_ref.shape[1])) * h
            result_ref[at, :] = total
            return carry

        jax.lax.fori_loop(0, t // rows, add_block, 0)
        return result_ref[...]

    lanes = _LANES if s % _LANES == 0 else 1
    shapes = (features, lanes), (t, features), (features, s), (t, s)
    return pl.run_scoped(body, *map(_scratch, shapes))


# With h = tanh(a_if + b_jf) and a cotangent d_ij,
#     dv_f = sum_ij d_ij h,
#     da_if = v_f sum_j d_ij (1 - h^2),    db_jf = v_f sum_i d_ij (1 - h^2).
# d h and d (1 - h^2) = d - (d h) h take three operations. Sums are kept per lane and per row of a
# register as long as possible, because an exchange between them takes another unit.
def weighted_tanh_vjp(v: Array, a: Array, b: Array, dlogits: Array) -> tuple[Array, Array, Array]:
    """Pulls `dlogits` [t, s] back through `weighted_tanh`: (dv [A], da [t, A], db [s, A])"""
    (t, features), s = a.shape, b.shape[0]
    rows = _rows(t, s)
    height = 8 if rows % 8 == 0 else 1  # rows of a register
    lanes = _LANES if s % _LANES == 0 else 1

    def body(a_ref, b_ref, d_ref, da_ref, db_ref, dv_ref):
        a_ref[...] = a
        b_ref[...] = b.T
        d_ref[...] = dlogits
        db_ref[...] = jnp.zeros_like(db_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

        def add_block(block, carry):
            at = _block(block, rows)
            x, d = a_ref[at, :], d_ref[at, :]
            for f in range(features):
                h = jnp.tanh(x[:, f : f + 1] + b_ref[f : f + 1, :])
                product = d * h
                slope = d - product * h
                dv_ref[f] += _fold(_fold(product, height, 0), lanes, 1)
                db_ref[f] += _fold(slope, height, 0)
                row_sums = jnp.sum(_fold(slope, lanes, 1), axis=1, keepdims=True)
                da_ref[at, f : f + 1] = row_sums
            return carry

        jax.lax.fori_loop(0, t // rows, add_block, 0)
        return jnp.sum(dv_ref[...], axis=(1, 2)), da_ref[...], jnp.sum(db_ref[...], axis=1).T

    shapes = ((t, features), (features, s), (t, s), (t, features))
    sums = ((features, height, s), (features, height, lanes))
    dv, da, db = pl.run_scoped(body, *map(_scratch, (*shapes, *sums)))
    return dv, v[None, :] * da, v[None, :] * db


def _rows(t: int, s: int) -> int:
    """The number of rows of a block, which divides t."""
    fitting = (rows for rows in (64, 32, 16, 8) if t % rows == 0 and rows * s <= _BLOCK)
    return next(fitting, 8 if t % 8 == 0 else t)


def _block(block: Array, rows: int) -> Any:
    return pl.ds(pl.multiple_of(block * rows, rows), rows)


def _scratch(shape: tuple[int, ...]) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _fold(terms: Array, size: int, axis: int) -> Array:
    """The sum of all parts of `size` along an axis, of which only registers are added."""
    parts = range(0, terms.shape[axis], size)
    return functools.reduce(
        jnp.add, (jax.lax.slice_in_dim(terms, n, n + size, axis=axis) for n in parts)
    )
