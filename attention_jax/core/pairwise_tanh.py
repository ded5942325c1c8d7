"""Tiles of additive attention: sum_f v_f tanh(a_if + b_jf) without an array [t, s, A].

Materialised, tanh(a + b) is an array of t s A floats, and XLA's tanh takes about 25 instructions
for each. Here a loop over the features adds to one [t, s] tile, 8 features per pass.
Where no query is large, it uses

    tanh(a + b) = 1 - 2 / (1 + z),    z = e^{2a} e^{2b},    tanh' = 4 / (z + 2 + 1/z)

so that in each tile a token needs one exponential per feature, and terms of a sum share divisions.
Its backward pass has three loops over tokens: one over keys, for the gradient of the queries
[A, t], and two over queries, for the gradients of the keys [A, s] and of v (terms [A, s], then
summed over the keys). On a GPU each of these loops is one reduction, into which the compiler fuses
the terms: compiled for an H100 it takes no more memory, and no step waits for the one before.

The queries of the whole batch decide the formula (`exceeds`):

    all |a| <= 5.4    no product of divisors overflows, since keys are clipped where tanh is -1 or 1
    all |a| <= 33     divisors are cut off, too: one more instruction for each pair and feature
    larger queries    the loops compute tanh itself

Attention asks once, before its loops over tiles (`Score.tile_params`): on a batch that is sharded
over devices, that takes one reduction of two bools, and none inside a loop. The formulas round
differently, so that a large query changes the last digits of other examples in its batch.
"""

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


def exceeds(a: Array) -> Array:
    """bool [2]: whether features [..., A] of queries exceed 5.4, and 33, anywhere in the batch.

    (In float64, 44 and 327.)
    """
    exponent = math.log(128 / float(jnp.finfo(a.dtype).eps)) / 2  # from there on tanh is 1
    limits = _narrow_limit(a.dtype), _clip_limit(a.dtype) - exponent
    sizes = jnp.abs(jax.lax.stop_gradient(a))  # NaN exceeds nothing, and must hide no other entry
    return any_over_batch(jnp.stack([jnp.any(sizes > limit) for limit in limits]))


def weighted_tanh(v: Array, a: Array, b: Array, exceeded: Array | None = None) -> Array:
    """logits_ij = sum_f v_f tanh(a_if + b_jf): (v [A], a [t, A], b [s, A]) -> [t, s]

    `exceeded` is the result of `exceeds` for all queries of the batch; None asks it for `a` alone.

    In float32 the absolute error is at most 5e-7 sum_f |v_f| + 1e-9 A max_f |v_f|, also where every
    tanh is tiny. It has every derivative. The first two keep no [t, s, A] in memory.
    """
    if _is_small(a, b):
        return _materialized(v, a, b)
    return _logits(exceeds(a) if exceeded is None else exceeded, v, a, b)


def weighted_tanh_vjp(
    v: Array, a: Array, b: Array, dlogits: Array, exceeded: Array | None = None
) -> tuple[Array, Array, Array]:
    """Pulls `dlogits` [t, s] back through `weighted_tanh`: (dv [A], da [t, A], db [s, A])"""
    if _is_small(a, b):
        return jax.vjp(_materialized, v, a, b)[1](dlogits)
    return _pull_back(exceeds(a) if exceeded is None else exceeded, v, a, b, dlogits)


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
#
# Logits. tanh is odd: where v_f is negative, we take |v_f|, and change the sign of the feature f of
# all tokens. With V the power of two above all |v_f|, w_f = c |v_f| / V and D_f = (1 + z) / w_f,
#     sum_f v_f tanh(a_f + b_f) = 2 V / c sum_f (w_f / 2 - 1 / D_f),
# where D_f = 1 / w_f + (e^{2 a_f} / w_f) e^{2 b_f} is one multiply-add for each pair and feature.
# A product of four numbers between 1 / M and M = 2^31 is a normal float. A divisor takes c / M for
# a weight below that, which changes the term of a feature by 2 V / M at the most.
#
# Gradients, with the cotangents c_ij of the logits:
#     dv_f = sum_ij c_ij tanh_ijf,    da_if = v_f sum_j c_ij tanh'_ijf,    db_jf likewise.
#
# Tangents. With d = 1 + z and s = 4 v (da + db), a feature has the tangent
#     v tanh' (da + db) + dv tanh = dv + ((s - 2 dv) d - s) / d^2.
#
# Narrow, |a| <= L = log(M) / 4: with c = M, 1 / M <= D_f. Keys are clipped at L + log(w_f) / 2,
# where v_f tanh(b - L) is as near to v_f as 2 V / M; so D_f <= 1 / w_f + e^{4 L} <= M + 1. For the
# gradients, whose terms have no weights w_f, keys are clipped at 3 L, and z and 1/z are
# no larger than M^2.
# Wide, |a| <= 33: with c = 1, 1 <= D_f, and no e^{2 a_f} / w_f underflows. (In float64 one may
# overflow, where w_f < 1e-24.) Divisors that are too large are cut off, which changes the term of a
# feature by 2 V / M at the most.


def _exponentials(x: Array, limit: Array | float) -> Array:
    return jnp.exp(2 * jnp.clip(x, -limit, limit))


def _clip_limit(dtype: jnp.dtype) -> float:
    """43 in float32, 348 in float64: e^{2x} and e^{-2x} are floats, neither of them subnormal."""
    return 0.49 * math.log(float(jnp.finfo(dtype).max))


def _narrow_limit(dtype: jnp.dtype) -> float:
    """L"""
    return math.log(_largest_factor(dtype, 4)) / 4


def _largest_factor(dtype: jnp.dtype, count: int) -> float:
    """A power of two; the product of `count` such factors is far from overflow. M for four."""
    return 2.0 ** (jnp.finfo(dtype).maxexp // count - 1)


def _at_most(top: float | None, x: Array) -> Array:
    """min(x, top), or x for None. NaN stays NaN, in one instruction (jnp.minimum takes three)."""
    return x if top is None else jnp.where(x > top, jnp.asarray(top, x.dtype), x)


def _sum_of_quotients(numerators: Sequence, divisors: Sequence[Array], per_division: int) -> Array:
    """sum_n c_n / d_n, where 2 or 4 terms share a division, the costly part.

    c_1 / d_1 + c_2 / d_2 = (c_1 d_2 + c_2 d_1) / (d_1 d_2)
    """
    while per_division > 1:
        odd_and_even = numerators[::2], divisors[::2], numerators[1::2], divisors[1::2]
        pairs = [*zip(*odd_and_even, strict=True)]
        numerators = [c1 * d2 + c2 * d1 for c1, d1, c2, d2 in pairs]
        divisors = [d1 * d2 for _, d1, _, d2 in pairs]
        per_division //= 2
    return _sum_of_terms([c / d for c, d in zip(numerators, divisors, strict=True)])


def _without_overflow(exponent: int, *coefficients: Array) -> tuple[Array, list[Array]]:
    """(factor, scaled): factor * scaled are the coefficients; finite scaled ones are <= 2^exponent.

    The factor is 1, or a power of two if a finite coefficient is larger. The callers choose the
    exponent so that a numerator of `_sum_of_quotients` is below 2^128.
    """
    dtype = coefficients[0].dtype
    is_large = [jnp.any((jnp.abs(c) > 2.0**exponent) & jnp.isfinite(c)) for c in coefficients]
    rest = jnp.asarray(2.0 ** (jnp.finfo(dtype).maxexp - exponent), dtype)
    factor = jnp.where(functools.reduce(jnp.logical_or, is_large), rest, 1)
    return factor, [c * (1 / factor) for c in coefficients]


def _logits_by_exponentials(narrow: bool, v: Array, a: Array, b: Array) -> Array:
    top = _largest_factor(v.dtype, 4)
    scale, limit = top if narrow else 1.0, _clip_limit(v.dtype)
    largest = jnp.maximum(jnp.max(jnp.abs(v)), jnp.finfo(v.dtype).tiny)
    half = jnp.ldexp(jnp.ones_like(largest), jnp.frexp(largest)[1] - 1)  # of V
    weights = jnp.abs(v) / half * (scale / 2)

    def add_features(weights, x, y):
        divisors = []
        for weight, x_f, y_f in zip(weights, x, y, strict=True):
            inverse = 1 / jnp.maximum(weight, scale / top)
            divisor = inverse + (inverse * x_f)[:, None] * y_f[None, :]
            divisors.append(_at_most(None if narrow else top, divisor))
        return _sum_of_terms(weights) / 2 - _sum_of_quotients([1.0] * len(weights), divisors, 4)

    key_limit: Array | float = limit
    if narrow:
        key_limit = _narrow_limit(v.dtype) + jnp.log(jnp.maximum(weights, 1))[None, :] / 2
    sign = jnp.where(v < 0, -1, 1).astype(v.dtype)[None, :]
    x, y = _exponentials(sign * a, limit), _exponentials(sign * b, key_limit)
    return 4 / scale * _sum_over_first_axis(add_features, weights, x.T, y.T) * half


def _pull_back_by_exponentials(
    narrow: bool, v: Array, a: Array, b: Array, dlogits: Array
) -> tuple[Array, Array, Array]:
    """Three loops, each of which adds to one array, elementwise.

    Each loop repeats the division. On XLA:CPU that is faster than the alternatives: storing a
    feature's [t, s] slopes and summing them over either axis takes twice the time of all three
    loops, and one loop for dv and db, with two results, takes half as long again as two loops.
    """
    limit = key_limit = _clip_limit(v.dtype)
    if narrow:
        key_limit = 3 * _narrow_limit(v.dtype)
    x, y = _exponentials(a, limit), _exponentials(b, key_limit)
    top = None if narrow else _largest_factor(v.dtype, 2)
    factor, (dlogits,) = _without_overflow(jnp.finfo(v.dtype).maxexp // 2 - 4, dlogits)
    dv = factor * _sum_over_tokens(False, top, x, y, dlogits)
    da = factor * _sum_over_tokens(True, top, y, x, dlogits.T)
    db = factor * _sum_over_tokens(True, top, x, y, dlogits)
    return jnp.sum(dv, axis=1), v[None, :] * da.T, v[None, :] * db.T


def _sum_over_tokens(slopes: bool, top: float | None, x: Array, y: Array, dlogits: Array) -> Array:
    """sum_i dlogits_ij tanh_ijf, or `slopes` tanh'_ijf: (x [t, A], y [s, A], [t, s]) -> [A, s]"""
    y, inverse_y = y.T, 1 / y.T

    def add_tokens(x, inverse_x, dlogits):
        dlogits = [d_i[None, :] for d_i in dlogits]
        z = [x_i[:, None] * y for x_i in x]
        if not slopes:
            divisors = [_at_most(top, 1 + z_i) for z_i in z]
            return _sum_of_terms(dlogits) - 2 * _sum_of_quotients(dlogits, divisors, 2)
        rest = [inverse_x_i[:, None] * inverse_y + 2 for inverse_x_i in inverse_x]
        divisors = [_at_most(top, z_i + rest_i) for z_i, rest_i in zip(z, rest, strict=True)]
        return 4 * _sum_of_quotients(dlogits, divisors, 2)

    return _sum_over_first_axis(add_tokens, x, 1 / x, dlogits)


def _push_by_exponentials(v: Array, a: Array, b: Array, dv: Array, da: Array, db: Array) -> Array:
    """sum_f v_f tanh'_ijf (da_if + db_jf) + dv_f tanh_ijf"""
    top, limit = _largest_factor(v.dtype, 4), _clip_limit(v.dtype)

    def add_features(x, y, dx, dy, dv):
        numerators, divisors = [], []
        for x_f, y_f, dx_f, dy_f, dv_f in zip(x, y, dx, dy, dv, strict=True):
            d = _at_most(top, 1 + x_f[:, None] * y_f[None, :])
            s = dx_f[:, None] + dy_f[None, :]
            numerators.append((s - 2 * dv_f) * d - s)
            divisors.append(d * d)
        return _sum_of_terms(dv) + _sum_of_quotients(numerators, divisors, 2)

    tangents = dv, v[None, :] * da, v[None, :] * db
    factor, (dv, dx, dy) = _without_overflow(jnp.finfo(v.dtype).maxexp // 4 - 3, *tangents)
    x, y = _exponentials(a, limit), _exponentials(b, limit)
    return factor * _sum_over_first_axis(add_features, x.T, y.T, 4 * dx.T, 4 * dy.T, dv)


# --- loops ---


def _sum_of_terms(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _sum_over_first_axis(add: Callable, *arrays: Array) -> Array:
    """The sum of `add` over the first axis (features or tokens), zero-padded."""
    padded = [
        jnp.pad(array, [(0, -len(array) % _TERMS_PER_PASS), *[(0, 0)] * (array.ndim - 1)])
        for array in arrays
    ]
    in_a_loop = functools.partial(_sum_in_a_loop, add)
    others = {"cpu": functools.partial(in_a_loop, on_all_threads=True)}
    others |= dict.fromkeys(_AT_ONCE_ON, functools.partial(_sum_at_once, add))
    return jax.lax.platform_dependent(*padded, default=in_a_loop, **others)


def _sum_in_a_loop(add: Callable, *arrays: Array, on_all_threads: bool = False) -> Array:
    # Checkpointed: otherwise the backward pass would save the tile of every step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(n):
        if on_all_threads:
            # XLA:CPU of jax 0.12 runs a loop on a single thread if its body is elementwise. A sort
            # in the body prevents that, and two integers are sorted in no time.
            n = jax.lax.sort(jnp.stack([n, n + 1]))[0]
        # One entry at a time: XLA:CPU copies a slice of several, which is 7 times slower.
        first, count, entry = n * _TERMS_PER_PASS, _TERMS_PER_PASS, jax.lax.dynamic_index_in_dim
        return add(*([entry(array, first + i, 0, False) for i in range(count)] for array in arrays))

    zeros = varying_as(jnp.zeros_like(jax.eval_shape(block, 0)), arrays)
    steps = len(arrays[0]) // _TERMS_PER_PASS
    return jax.lax.fori_loop(0, steps, lambda n, total: total + block(n), zeros)


@functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)
def _sum_at_once(add: Callable, *arrays: Array) -> Array:
    """A single reduction, into which XLA:GPU fuses the terms. (A step of a loop is a launch.)"""
    blocks = [array.reshape(-1, _TERMS_PER_PASS, *array.shape[1:]) for array in arrays]
    return jnp.sum(jax.vmap(lambda *block: add(*map(list, block)))(*blocks), axis=0)


# --- the choice between the formulas ---


def _by_size(
    by_exponentials: Callable,
    by_tanh: Callable,
    tangent: Callable | None = None,
    narrow: Callable | None = None,
) -> Callable:
    """A function of (exceeded, *args) that calls one of the formulas, by the result of `exceeds`.

    `narrow` is faster on a CPU; elsewhere there is one formula less to compile.

    `tangent(result, (exceeded, *args), tangents of args)` is the tangent of the result. Without it,
    JAX differentiates `by_tanh`: derivatives of the quotients would overflow where z is large, and
    take twice the time.
    """

    def of_moderate_queries(exceeded, *args):
        if narrow is None:
            return by_exponentials(*args)
        return jax.lax.platform_dependent(
            exceeded[0],
            *args,
            cpu=lambda wide, *args: jax.lax.cond(wide, by_exponentials, narrow, *args),
            default=lambda wide, *args: by_exponentials(*args),
        )

    @jax.custom_jvp
    def function(exceeded, *args):
        branches = lambda exceeded, *args: by_tanh(*args), of_moderate_queries
        return jax.lax.cond(exceeded[1], *branches, exceeded, *args)

    @function.defjvp
    def function_jvp(primals, tangents):
        result = function(*primals)
        if tangent is not None:
            return result, tangent(result, primals, tangents[1:])
        return result, jax.jvp(by_tanh, primals[1:], tangents[1:])[1]

    return jax.jit(function)  # JAX traces it once for many loops


_pull_back = _by_size(
    functools.partial(_pull_back_by_exponentials, False),
    _pull_back_by_tanh,
    narrow=functools.partial(_pull_back_by_exponentials, True),
)
_push = _by_size(_push_by_exponentials, _push_by_tanh)


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


_logits = _by_size(
    functools.partial(_logits_by_exponentials, False),
    _logits_by_tanh,
    _tangent,
    narrow=functools.partial(_logits_by_exponentials, True),
)
