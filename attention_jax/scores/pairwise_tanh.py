"""Tiles of additive attention: sum_f v_f tanh(a_if + b_jf) without an array [t, s, A].

Materialised, tanh(a + b) is an array of t s A floats, and XLA's tanh takes about 25 instructions
for each. Here a loop over the features adds to one [t, s] tile. Where no query is large, it uses

    tanh(a + b) = 1 - 2 r,    r = 1 / (1 + z),    z = e^{2a} e^{2b},    tanh' = 4 r (1 - r)

so that each token needs one exponential per feature, and a pair a product and half a division.

An exponential overflows for features above 44 in float32, so features beyond 43 are clipped. While
|a| <= 33, that changes nothing: tanh(a + b) is -1 or 1 for every clipped b. `is_large` says whether
any query of the whole batch exceeds this bound, and the loops then compute tanh itself. Attention
asks once, before its loops over tiles (`Score.tile_params`): on a batch that is sharded over
devices, that takes one reduction of one bool, and none inside a loop. The two formulas round
differently, so that a large query changes the last digits of other examples in its batch.

Milliseconds for T = S = 1024, A = 128, float32, on 2 cores with AVX-512, forward and backward:
materialised 200 and 930, loops of tanh 25 and 90, loops of exponentials 5.5 and 25.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.batches import any_over_batch
from attention_jax.core.meshes import varying_as

Array = jax.Array

_SMALL = 2**14  # t s A up to which the materialised expression is as fast as a loop


def is_large(a: Array) -> Array:
    """Whether features [..., A] of queries exceed 33 (float64: 327) anywhere in the batch; bool."""
    limit = _clip_limit(a.dtype) - math.log(_largest_z(a.dtype)) / 2
    return any_over_batch(jnp.any(jnp.abs(jax.lax.stop_gradient(a)) > limit))


def weighted_tanh(v: Array, a: Array, b: Array, large: Array | None = None) -> Array:
    """logits_ij = sum_f v_f tanh(a_if + b_jf): (v [A], a [t, A], b [s, A]) -> [t, s]

    `large` is that of `is_large` for queries that contain `a`; None for `a` alone.

    In float32 the absolute error is at most 5e-7 sum_f |v_f|, for inputs of any size; a sum of tiny
    tanh is no more exact than that. It has every derivative. First derivatives keep no [t, s, A] in
    memory; reverse mode of reverse mode keeps A / 4 tiles.
    """
    if _is_small(a, b):
        return _materialized(v, a, b)
    return _logits(_large(a, large), v, a, b)


def weighted_tanh_vjp(
    v: Array, a: Array, b: Array, dlogits: Array, large: Array | None = None
) -> tuple[Array, Array, Array]:
    """Pulls `dlogits` [t, s] back through `weighted_tanh`: (dv [A], da [t, A], db [s, A])"""
    if _is_small(a, b):
        return jax.vjp(_materialized, v, a, b)[1](dlogits)
    return _pull_back(_large(a, large), v, a, b, dlogits)


def _large(a: Array, large: Array | None) -> Array:
    return is_large(a) if large is None else large


def _is_small(a: Array, b: Array) -> bool:
    return a.shape[0] * b.shape[0] * a.shape[1] <= _SMALL


def _materialized(v: Array, a: Array, b: Array) -> Array:
    return jnp.matmul(jnp.tanh(a[:, None, :] + b[None, :, :]), v)


# --- two formulas for the same sums ---


class _Form(NamedTuple):
    """A formula for sums over n of weighted tanh or tanh', with `unroll` terms in one pass."""

    unroll: int
    prepare: Callable[[Array], Array]  # applied to the features, before the loop
    join: Callable[[Array, Array], Array]  # prepared features of query and key -> of the pair
    tanhs: Callable[[Sequence[Array], Sequence[Array]], Array]  # sum_n w_n tanh_n
    slopes: Callable[[Sequence[Array], Sequence[Array]], Array]  # sum_n w_n tanh'_n


def _tanhs(weights: Sequence[Array], sums: Sequence[Array]) -> Array:
    return _total([w * jnp.tanh(u) for w, u in zip(weights, sums, strict=True)])


def _slopes(weights: Sequence[Array], sums: Sequence[Array]) -> Array:
    return _total([w * (1 - jnp.tanh(u) ** 2) for w, u in zip(weights, sums, strict=True)])


# For any input, infinities too: tanh(inf - 1) = 1. From 1 to 8 terms in a pass are equally fast;
# JAX's derivatives keep one tile for each term of a pass.
_TANH = _Form(4, prepare=lambda x: x, join=jnp.add, tanhs=_tanhs, slopes=_slopes)


def _exponential_tanhs(weights: Sequence[Array], products: Sequence[Array]) -> Array:
    """sum_n w_n - 2 sum_n w_n / (1 + z_n)"""
    quotients = []
    for w1, w2, z1, z2 in _by_two(weights, products):
        d1, d2 = _one_plus(z1), _one_plus(z2)
        quotients.append((w1 * d2 + w2 * d1) / (d1 * d2))
    return _total(weights) - 2 * _total(quotients)


def _exponential_slopes(weights: Sequence[Array], products: Sequence[Array]) -> Array:
    """4 sum_n w_n r_n (1 - r_n)"""
    terms = []
    for w1, w2, z1, z2 in _by_two(weights, products):
        d1, d2 = _one_plus(z1), _one_plus(z2)
        inverse = 1 / (d1 * d2)
        r1, r2 = inverse * d2, inverse * d1
        terms.append(w1 * (r1 - r1 * r1) + w2 * (r2 - r2 * r2))
    return 4 * _total(terms)


# For queries that are not large (`is_large`). Two terms share one division, the costly part. With 4
# terms in a pass it takes a tenth longer, with 16 as long as with 8.
_EXPONENTIAL = _Form(
    8,
    prepare=lambda x: jnp.exp(2 * jnp.clip(x, -_clip_limit(x.dtype), _clip_limit(x.dtype))),
    join=jnp.multiply,
    tanhs=_exponential_tanhs,
    slopes=_exponential_slopes,
)


def _total(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _by_two(weights, pairs):
    return zip(weights[::2], weights[1::2], pairs[::2], pairs[1::2], strict=True)


def _one_plus(z: Array) -> Array:
    """1 + min(z, 2^30), or 2^59 in float64: there tanh is 1 and a product of two stays finite."""
    top = jnp.asarray(_largest_z(z.dtype), z.dtype)
    return 1 + jnp.where(z > top, top, z)  # keeps NaN, in one instruction (jnp.minimum: three)


def _largest_z(dtype: jnp.dtype) -> float:
    return 128 / float(jnp.finfo(dtype).eps)


def _clip_limit(dtype: jnp.dtype) -> float:
    """43 in float32, 348 in float64: e^{2x} and e^{-2x} are floats, neither of them subnormal."""
    return 0.49 * math.log(float(jnp.finfo(dtype).max))


def _without_overflow(weights: Array) -> tuple[Array, Array]:
    """(scaled, factor): `factor * scaled` are the weights, and scaled * (1 + z) does not overflow.

    The factor is a power of two: 1 unless a weight is near the largest float.
    """
    most = 8 * _largest_z(weights.dtype)
    near_largest = jnp.max(jnp.abs(weights)) > float(jnp.finfo(weights.dtype).max) / most
    scale = jnp.where(near_largest, jnp.asarray(1 / most, weights.dtype), 1)
    return weights * scale, 1 / scale


# --- the loops ---


def _logits_in(form: _Form, v: Array, a: Array, b: Array) -> Array:
    def add_features(v, a, b):
        return form.tanhs(v, [form.join(x[:, None], y[None, :]) for x, y in zip(a, b, strict=True)])

    v, factor = _without_overflow(v)
    return factor * _sum_over_rows(
        form.unroll, add_features, v, form.prepare(a).T, form.prepare(b).T
    )


def _pull_back_in(form: _Form, v: Array, a: Array, b: Array, dlogits: Array) -> tuple:
    """Three loops, each of which adds to one array, elementwise.

    Each loop repeats the division. On XLA:CPU that is faster than the alternatives: storing a
    feature's [t, s] slopes and summing them over either axis takes twice the time of all three
    loops, and one loop for dv and db, with two results, takes half as long again as two loops.
    """
    x, y = form.prepare(a), form.prepare(b)
    weights, factor = _without_overflow(dlogits)
    dv = factor * _sum_over_tokens(form.tanhs, form, x, y.T, weights)
    da = _sum_over_tokens(form.slopes, form, y, x.T, dlogits.T)
    db = _sum_over_tokens(form.slopes, form, x, y.T, dlogits)
    return jnp.sum(dv, axis=1), v[None, :] * da.T, v[None, :] * db.T


def _sum_over_tokens(terms: Callable, form: _Form, x: Array, y: Array, weights: Array) -> Array:
    """sum_i weights_ij term_fij: (x [t, A], y [A, s], weights [t, s]) -> [A, s]"""

    def add_tokens(x, weights):
        return terms([w[None, :] for w in weights], [form.join(row[:, None], y) for row in x])

    return _sum_over_rows(form.unroll, add_tokens, x, weights)


def _sum_over_rows(unroll: int, add: Callable, *arrays: Array) -> Array:
    """The sum of `add` over the rows of the arrays, `unroll` rows at a time, zero-padded."""
    blocks = -(-arrays[0].shape[0] // unroll)
    padded = [_pad_rows(array, blocks * unroll) for array in arrays]

    # Checkpointed: otherwise the backward pass would save the tile of every step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(n):
        return add(*(_rows(array, n * unroll, unroll) for array in padded))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(block, 0))
    zeros = varying_as(zeros, padded)
    return jax.lax.fori_loop(0, blocks, lambda n, total: total + block(n), zeros)


def _pad_rows(array: Array, count: int) -> Array:
    return jnp.pad(array, [(0, count - array.shape[0])] + [(0, 0)] * (array.ndim - 1))


def _rows(array: Array, first: Array, count: int) -> list[Array]:
    """`count` rows, one by one: XLA:CPU copies a slice of several rows, which is 7 times slower."""
    return [jax.lax.dynamic_index_in_dim(array, first + i, 0, False) for i in range(count)]


# --- the choice between the two formulas ---


def _choose_form(of_form: Callable) -> Callable:
    """`of_form`, by exponentials unless queries are large; its derivatives always by tanh.

    JAX's derivatives of the quotients would overflow where z is large, and take twice the time.
    """
    by_tanh, by_exponential = (functools.partial(of_form, f) for f in (_TANH, _EXPONENTIAL))

    @jax.custom_jvp
    def function(large, *args):
        return jax.lax.cond(large, by_tanh, by_exponential, *args)

    @function.defjvp
    def function_jvp(primals, tangents):
        _, tangent = jax.jvp(by_tanh, primals[1:], tangents[1:])
        return function(*primals), tangent

    return jax.jit(function)  # JAX traces it once for many loops


_logits = _choose_form(_logits_in)
_pull_back = _choose_form(_pull_back_in)
