"""The terms of an entropy and of a divergence, with finite derivatives for weights of any size."""

import math

import jax
import jax.numpy as jnp

Array = jax.Array


def is_zero(weights: Array) -> Array:
    """Whether weights are 0 or subnormal."""
    # XLA treats subnormal numbers as 0 in some operations and not in others, and their reciprocals
    # overflow. NaN and negative numbers must stay visible as NaN, so they do not count as 0.
    return jnp.abs(weights) < jnp.finfo(weights.dtype).tiny


@jax.custom_jvp
def surprise(weights: Array) -> Array:
    """-w log w, and 0 at 0, with derivative 0."""
    return -weights * _log(weights)


# d(-w log w) = -(log w + 1) dw. JAX derives the same, but its second derivative contains w^-2,
# which overflows in float32 below w = 1e-19. The second derivative of this rule is -1 / w.
@surprise.defjvp
def _surprise_jvp(primals, tangents):
    (weights,), (dweights,) = primals, tangents
    slope = jnp.where(is_zero(weights), 0, -(_log(weights) + 1))
    return surprise(weights), slope * dweights


# With a = m (1 + d), b = m (1 - d) it is m ((1 + d) log(1 + d) + (1 - d) log(1 - d)) / 2, whose two
# terms cancel to order d^2. It also equals m (log(1 - d^2) + 2 d atanh(d)) / 2, which has no such
# cancellation and cannot be negative, but is inf - inf at d = 1.
@jax.custom_jvp
def divergence(a: Array, b: Array) -> Array:
    """(a log(a / m) + b log(b / m)) / 2 with m = (a + b) / 2, and 0 log 0 = 0.

    Accurate where a and b are nearly the same, and never negative. Weights of 0 have derivative 0.
    """
    a, b = (jnp.where(is_zero(weights), 0, weights) for weights in (a, b))
    total = jnp.where((a == 0) & (b == 0), 1, a + b)
    difference = (a - b) / total
    close = jnp.abs(difference) < 0.5
    d = jnp.where(close, difference, 0)
    near = total * (jnp.log1p(-d * d) + 2 * d * jnp.arctanh(d)) / 4
    far = (a * _log(2 * a / total) + b * _log(2 * b / total)) / 2
    return jnp.where(close, near, far)


# The derivatives of the two x log(x / m) with respect to m cancel, so that
#     df = (log(a / m) da + log(b / m) db) / 2.
# Written with logarithms of a, b and m, its derivatives have no squares that underflow.
@divergence.defjvp
def _divergence_jvp(primals, tangents):
    log_mean = _log(primals[0] + primals[1]) - math.log(2)
    dvalue = jnp.zeros_like(log_mean)
    for weights, dweights in zip(primals, tangents, strict=True):
        slope = jnp.where(is_zero(weights), 0, (_log(weights) - log_mean) / 2)
        dvalue += slope * dweights
    return divergence(*primals), dvalue


def _log(weights: Array) -> Array:
    return jnp.log(jnp.where(is_zero(weights), 1, weights))
