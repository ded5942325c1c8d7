"""Additive attention in kernels on a GPU: logits and gradients as sums over features.

With one exponential for each token and feature, x = e^{2a} and y = e^{2b},

    tanh(a + b) = 1 - 2 r,    r = 1 / d,    d = 1 + x y,    tanh' = 4 r (1 - r).

The special function unit of a GPU takes eight times as long for a reciprocal as the other units for
a product or a sum. So two features of a pair share one reciprocal:

    w1 / d1 + w2 / d2 = (w1 d2 + w2 d1) c,    1 / d1 = c d2,    1 / d2 = c d1,    c = 1 / (d1 d2).

x y could overflow where inputs are large. An example with large inputs keeps x = a and y = b, and
its pairs take an exponential too: d = 1 + e^{2 min(a + b, 10)}, where tanh(10) is 1 in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

FEATURES_PER_STEP = 4  # of a loop over features: two reciprocals for each pair
# Up to this |a| + |b| the product of two d is at most 2^126: it and its reciprocal are normal.
_LARGEST_SUM = 21.8
_LARGEST_WEIGHT = 2.0**60
_SATURATED = 10.0  # tanh(10) is 1 in float32
_WHOLE_COPY = 32  # a copy into a program's memory is a multiple of so many floats


def token_features(v: Array, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """(v [A], a [T, A], b [S, A]) -> what the kernels read, in float32, padded to whole steps.

    Returns:
        weights: [rows, step] -2 v in F / step rows; the next row begins with sum_f v_f.
        small: int32 [1] whether the features are exponentials.
        queries, keys: [F, T] e^{2a} and [F, S] e^{2b}; or a and b.
    """
    v, a, b = (array.astype(jnp.float32) for array in (v, a, b))
    largest = jnp.max(jnp.abs(a)) + jnp.max(jnp.abs(b))
    # A NaN is not small: the exponentials of the pairs keep it.
    small = (largest <= _LARGEST_SUM) & (jnp.max(jnp.abs(v)) <= _LARGEST_WEIGHT)
    step = FEATURES_PER_STEP
    padding = -v.shape[0] % step

    def side(features: Array) -> Array:
        prepared = jnp.where(small, jnp.exp(2 * features), features)
        return jnp.pad(prepared.T, ((0, padding), (0, 0)))

    weights = jnp.concatenate([jnp.pad(-2 * v, (0, padding)), jnp.sum(v)[None]])
    weights = jnp.pad(weights, (0, -weights.shape[0] % _WHOLE_COPY)).reshape(-1, step)
    return weights, small.astype(jnp.int32)[None], side(a), side(b)


# da_if = sum_j g_ij v_f tanh'_ijf,    dv_f = sum_ij g_ij (1 - 2 r_ijf).
def pull_back_sums(
    v: Array, slopes: tuple[Array, Array], inverses: Array, drows: Array
) -> tuple[Array, Array, Array]:
    """(dv [A], da [T, A], db [S, A]), given sums over pairs with the cotangents g of the logits.

    Args:
        v: [A].
        slopes: [F, T] sum_j g r (1 - r) and [F, S] sum_i g r (1 - r).
        inverses: [F, T] sum_j g r.
        drows: [T] sum_j g.
    """
    da, db = (4 * v.astype(jnp.float32)[None] * side[: v.shape[0]].T for side in slopes)
    return jnp.sum(drows) - 2 * jnp.sum(inverses[: v.shape[0]], axis=1), da, db


# --- in a kernel, on a tile of pairs ---


def product_denominator(x: Array, y: Array) -> Array:
    """d of exponentials x, y."""
    return 1 + x * y


def sum_denominator(a: Array, b: Array) -> Array:
    """d of features a, b of any size."""
    return 1 + jnp.exp(2 * jnp.minimum(a + b, _SATURATED))


DENOMINATORS = (sum_denominator, product_denominator)  # by `small` of `token_features`


def two_quotients(w1: Any, w2: Any, d1: Array, d2: Array, reciprocal: Callable) -> Array:
    """w1 / d1 + w2 / d2"""
    return (w1 * d2 + w2 * d1) * reciprocal(d1 * d2)


def two_inverses(d1: Array, d2: Array, reciprocal: Callable) -> tuple[Array, Array]:
    """(1 / d1, 1 / d2)"""
    inverse = reciprocal(d1 * d2)
    return inverse * d2, inverse * d1
