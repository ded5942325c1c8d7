"""Tiles of additive attention: sum_f v_f tanh(a_if + b_jf) without an array [t, s, A].

Materialised, tanh(a + b) is an array of t s A floats, and XLA's tanh takes about 25 instructions
for each. Here a loop over the features adds to one [t, s] tile, 8 features per pass.
Where no query is large, it uses

    tanh(a + b) = 1 - 2 r,    r = 1 / (1 + z),    z = e^{2a} e^{2b},    tanh' = 4 r (1 - r)

so that in each tile a token needs one exponential per feature, and a pair needs a product and half
a division per feature, because two terms of a sum share one (`_by_two`). Its backward pass has
three loops over tokens: one over keys, for the gradient of the queries [A, t], and two over
queries, for the gradients of the keys [A, s] and of v (terms [A, s], then summed over the keys).
On a GPU each of these loops is one reduction, into which the compiler fuses the terms: compiled for
an H100 it takes no more memory, and no step waits for the one before.

An exponential overflows for features above 44 in float32, so features beyond 43 are clipped. While
|a| <= 33, that changes nothing: tanh(a + b) is -1 or 1 for every clipped b. `is_large` says whether
any query of the whole batch exceeds this bound, and the loops then compute tanh itself. Attention
asks once, before its loops over tiles (`Score.tile_params`): on a batch that is sharded over
devices, that takes one reduction of one bool, and none inside a loop. The two formulas round
differently, so that a large query changes the last digits of other examples in its batch.

Milliseconds for T = S = 1024, A = 128, float32, on 2 cores with AVX-512, forward and backward:
materialised 200 and 930, loops of tanh 25 and 70, loops of exponentials 5.5 and 25.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.batches import any_over_batch
from attention_jax.core.calls import linear_map
from attention_jax.core.meshes import varying_as

Array = jax.Array

# Terms that one pass of a loop adds. With 4 the exponentials take a tenth longer, with 16 as long.
_TERMS_PER_PASS = 8
_AT_ONCE_ON = ("cuda", "rocm")  # platforms whose sums over features and tokens are no loops
_SMALL = 2**14  # t s A up to which the materialised expression is as fast as a loop


def is_large(a: Array) -> Array:
    """Whether features [..., A] of queries exceed 33 (float64: 327) anywhere in the batch; bool."""
    limit = _clip_limit(a.dtype) - math.log(_largest_z(a.dtype)) / 2
    return any_over_batch(jnp.any(jnp.abs(jax.lax.stop_gradient(a)) > limit))


def weighted_tanh(v: Array, a: Array, b: Array, large: Array | None = None) -> Array:
    """logits_ij = sum_f v_f tanh(a_if + b_jf): (v [A], a [t, A], b [s, A]) -> [t, s]

    `large` is the result of `is_large` for all queries of the batch; None asks it for `a` alone.

    In float32 the absolute error is at most 5e-7 sum_f |v_f|, for inputs of any size, also where
    every tanh is tiny. It has every derivative. The first two keep no [t, s, A] in memory.
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
    lengths = a.shape[0], b.shape[0]
    return not any(map(is_symbolic_dim, lengths)) and math.prod(lengths) * a.shape[1] <= _SMALL


def _materialized(v: Array, a: Array, b: Array) -> Array:
    return jnp.matmul(jnp.tanh(a[:, None, :] + b[None, :, :]), v)


# --- by tanh, for inputs of any size, infinities too: tanh(inf - 1) = 1 ---


def _tanh_of_feature(v: Array, a: Array, b: Array) -> Array:
    """v tanh(a_i + b_j): ([], [t], [s]) -> [t, s]"""
    return v * jnp.tanh(a[:, None] + b[None, :])


def _logits_by_tanh(v: Array, a: Array, b: Array) -> Array:
    def add_features(v, a, b):
        return _sum_of_terms([_tanh_of_feature(*each) for each in zip(v, a, b, strict=True)])

    return _sum_over_first_axis(add_features, v, a.T, b.T)


def _pull_back_by_tanh(v: Array, a: Array, b: Array, dlogits: Array) -> tuple:
    @jax.checkpoint
    def feature(v_and_tokens):
        return jax.vjp(_tanh_of_feature, *v_and_tokens)[1](dlogits)

    dv, da, db = jax.lax.map(feature, (v, a.T, b.T))
    return dv, da.T, db.T


def _push_by_tanh(v: Array, a: Array, b: Array, *tangents: Array) -> Array:
    return jax.jvp(_logits_by_tanh, (v, a, b), tangents)[1]


# --- by exponentials, for queries that are not large ---


def _exponentials(x: Array) -> Array:
    limit = _clip_limit(x.dtype)
    return jnp.exp(2 * jnp.clip(x, -limit, limit))


def _one_plus(z: Array) -> Array:
    """d = 1 + min(z, 2^30), in float64 2^59: there tanh is 1, and a product of two d is finite."""
    top = jnp.asarray(_largest_z(z.dtype), z.dtype)
    return 1 + jnp.where(z > top, top, z)  # keeps NaN, in one instruction (jnp.minimum: three)


def _divisors(x: Sequence[Array], y: Sequence[Array]) -> list[Array]:
    return [_one_plus(x_f[:, None] * y_f[None, :]) for x_f, y_f in zip(x, y, strict=True)]


def _tanhs(coefficients: Sequence[Array], divisors: Sequence[Array]) -> Array:
    """sum_n c_n tanh_n = sum_n c_n - 2 sum_n c_n / d_n"""
    pairs = _by_two(coefficients, divisors)
    return _sum_of_terms(coefficients) - 2 * _sum_of_terms(
        [(c1 * d2 + c2 * d1) / (d1 * d2) for c1, c2, d1, d2 in pairs]
    )


def _slopes(coefficients: Sequence[Array], divisors: Sequence[Array]) -> Array:
    """sum_n c_n tanh'_n = 4 sum_n c_n r_n (1 - r_n),  r_n = 1 / d_n"""
    terms = []
    for c1, c2, d1, d2 in _by_two(coefficients, divisors):
        inverse = 1 / (d1 * d2)
        r1, r2 = inverse * d2, inverse * d1
        terms.append(c1 * (r1 - r1 * r1) + c2 * (r2 - r2 * r2))
    return 4 * _sum_of_terms(terms)


def _by_two(coefficients, divisors):
    """Two terms share one division, the costly part."""
    return zip(coefficients[::2], coefficients[1::2], divisors[::2], divisors[1::2], strict=True)


def _largest_z(dtype: jnp.dtype) -> float:
    return 128 / float(jnp.finfo(dtype).eps)


def _clip_limit(dtype: jnp.dtype) -> float:
    """43 in float32, 348 in float64: e^{2x} and e^{-2x} are floats, neither of them subnormal."""
    return 0.49 * math.log(float(jnp.finfo(dtype).max))


def _without_overflow(coefficients: Array) -> tuple[Array, Array]:
    """(scaled, factor): factor * scaled are the coefficients, and no c1 d2 of `_tanhs` overflows.

    The factor is a power of two: 1 unless a coefficient is near the largest float. `_slopes` needs
    none: it multiplies coefficients by r <= 1 only.
    """
    most = 8 * _largest_z(coefficients.dtype)
    near_largest = jnp.max(jnp.abs(coefficients)) > float(jnp.finfo(coefficients.dtype).max) / most
    scale = jnp.where(near_largest, jnp.asarray(1 / most, coefficients.dtype), 1)
    return coefficients * scale, 1 / scale


def _logits_by_exponentials(v: Array, a: Array, b: Array) -> Array:
    def add_features(v, x, y):
        return _tanhs(v, _divisors(x, y))

    v, factor = _without_overflow(v)
    return factor * _sum_over_first_axis(add_features, v, _exponentials(a).T, _exponentials(b).T)


def _pull_back_by_exponentials(v: Array, a: Array, b: Array, dlogits: Array) -> tuple:
    """Three loops, each of which adds to one array, elementwise.

    Each loop repeats the division. On XLA:CPU that is faster than the alternatives: storing a
    feature's [t, s] slopes and summing them over either axis takes twice the time of all three
    loops, and one loop for dv and db, with two results, takes half as long again as two loops.
    """
    x, y = _exponentials(a), _exponentials(b)
    scaled, factor = _without_overflow(dlogits)
    dv = factor * _sum_over_tokens(_tanhs, x, y.T, scaled)
    da = _sum_over_tokens(_slopes, y, x.T, dlogits.T)
    db = _sum_over_tokens(_slopes, x, y.T, dlogits)
    return jnp.sum(dv, axis=1), v[None, :] * da.T, v[None, :] * db.T


def _push_by_exponentials(v: Array, a: Array, b: Array, dv: Array, da: Array, db: Array) -> Array:
    """sum_f v_f tanh'_ijf (da_if + db_jf) + dv_f tanh_ijf"""

    def add_features(x, y, dx, dy, dv):
        divisors = _divisors(x, y)
        dsums = [dx_f[:, None] + dy_f[None, :] for dx_f, dy_f in zip(dx, dy, strict=True)]
        return _slopes(dsums, divisors) + _tanhs(dv, divisors)

    args = (_exponentials(a).T, _exponentials(b).T, (v[None, :] * da).T, (v[None, :] * db).T, dv)
    return _sum_over_first_axis(add_features, *args)


def _sum_over_tokens(terms: Callable, x: Array, y: Array, dlogits: Array) -> Array:
    """sum_i dlogits_ij term_fij: (x [t, A], y [A, s], dlogits [t, s]) -> [A, s]"""

    def add_tokens(x, dlogits):
        return terms([d[None, :] for d in dlogits], [_one_plus(x_i[:, None] * y) for x_i in x])

    return _sum_over_first_axis(add_tokens, x, dlogits)


# --- loops ---


def _sum_of_terms(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _sum_over_first_axis(add: Callable, *arrays: Array) -> Array:
    """The sum of `add` over the first axis (features or tokens), zero-padded."""
    padded = [
        jnp.pad(array, [(0, -len(array) % _TERMS_PER_PASS), *[(0, 0)] * (array.ndim - 1)])
        for array in arrays
    ]
    at_once = functools.partial(_sum_at_once, add)
    in_a_loop = functools.partial(_sum_in_a_loop, add)
    return jax.lax.platform_dependent(
        *padded, default=in_a_loop, **dict.fromkeys(_AT_ONCE_ON, at_once)
    )


def _sum_in_a_loop(add: Callable, *arrays: Array) -> Array:
    # Checkpointed: otherwise the backward pass would save the tile of every step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(n):
        first = n * _TERMS_PER_PASS
        return add(*(_entries(array, first, _TERMS_PER_PASS) for array in arrays))

    zeros = varying_as(jnp.zeros_like(jax.eval_shape(block, 0)), arrays)
    steps = len(arrays[0]) // _TERMS_PER_PASS
    return jax.lax.fori_loop(0, steps, lambda n, total: total + block(n), zeros)


@functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)
def _sum_at_once(add: Callable, *arrays: Array) -> Array:
    """A single reduction, into which XLA:GPU fuses the terms. (A step of a loop is a launch.)"""
    blocks = [array.reshape(-1, _TERMS_PER_PASS, *array.shape[1:]) for array in arrays]
    return jnp.sum(jax.vmap(lambda *block: add(*map(list, block)))(*blocks), axis=0)


def _entries(array: Array, first: Array, count: int) -> list[Array]:
    """`count` entries, one by one: XLA:CPU copies a slice of several, which is 7 times slower."""
    return [jax.lax.dynamic_index_in_dim(array, first + i, 0, False) for i in range(count)]


# --- the choice between the two formulas ---


def _by_size(by_tanh: Callable, by_exponentials: Callable, tangent: Callable | None = None):
    """A function that calls `by_exponentials`, or `by_tanh` if queries are large.

    `tangent(result, (large, *args), tangents of args)` is the tangent of the result. Without it,
    JAX differentiates `by_tanh`: derivatives of the quotients would overflow where z is large, and
    take twice the time.
    """

    @jax.custom_jvp
    def function(large, *args):
        return jax.lax.cond(large, by_tanh, by_exponentials, *args)

    @function.defjvp
    def function_jvp(primals, tangents):
        result = function(*primals)
        if tangent is not None:
            return result, tangent(result, primals, tangents[1:])
        return result, jax.jvp(by_tanh, primals[1:], tangents[1:])[1]

    return jax.jit(function)  # JAX traces it once for many loops


_pull_back = _by_size(_pull_back_by_tanh, _pull_back_by_exponentials)
_push = _by_size(_push_by_tanh, _push_by_exponentials)


def _tangent(logits: Array, primals: Sequence[Array], tangents: Sequence[Array]) -> Array:
    """The tangent of the logits; its transpose is `_pull_back`."""
    (tangent,) = linear_map(
        lambda primals, tangents: [_push(*primals, *tangents)],
        lambda primals, cotangents: list(_pull_back(*primals, *cotangents)),
        list(primals),
        list(tangents),
        [jax.typeof(logits).to_tangent_aval()],
    )
    return tangent


_logits = _by_size(_logits_by_tanh, _logits_by_exponentials, _tangent)
