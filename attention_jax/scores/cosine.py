"""Cosine similarity of queries and keys."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from attention_jax.scores.contract import Params
from attention_jax.scores.dot import Dot, check_scale

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Cosine(Dot):
    """e(q, k) = scale (q . k) / (|q| |k|): only the directions count

    With a vector of zeros it is 0, and so are its derivatives there.

    Params: {"log_scale": []}, and scale = exp(log_scale), sqrt(Dk) at first; {} with a fixed scale.

    Attributes:
        scale: the factor, any finite float; None to learn it. The cosine of independent random
            directions has standard deviation 1 / sqrt(Dk): with scale 1, weights are near uniform.

    Source: Graves, Wayne and Danihelka 2014, section 3.3.1, equations 5 and 6 (their K is the
    cosine, their key strength beta is scale; k_t is q and a row of the memory M_t is k).

    >>> query, key = jnp.array([[3.0, 0.0]]), jnp.array([[1.0, 0.0], [0.0, 5.0], [0.0, 0.0]])
    >>> Cosine(scale=2.0)({}, query, key).round(4)
    Array([[2., 0., 0.]], dtype=float32)
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        check_scale(self.scale)

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        if self.scale is not None:
            return {}
        # E[(u . w)^2] = 1 / Dk for independent directions u and w.
        return {"log_scale": jnp.asarray(math.log(key_dim) / 2, float)}

    def project_query(self, params: Params, query: Array) -> Array:
        if self.scale is None:
            scale = jnp.exp(params["log_scale"]).astype(query.dtype)
        else:
            scale = jnp.asarray(float(self.scale), query.dtype)
        return _direction(query) * scale

    def project_key(self, params: Params, key: Array) -> Array:
        return _direction(key)


def _direction(x: Array) -> Array:
    """x / |x| over the last axis, 0 where x is 0; of long and short vectors alike.

    Squares would overflow or vanish, were x not divided by its largest component first. A factor of
    x changes nothing, so this one may count as a constant: derivatives of any order stay right.
    """
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    zero = largest == 0
    # Replaced before anything that has no derivative at 0: what comes back would be 0 * inf, NaN.
    x = jnp.where(zero, 0, x) / jnp.where(zero, 1, largest)
    squares = jnp.where(zero, 1, jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.sqrt(squares)
