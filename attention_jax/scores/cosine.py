"""Cosines of queries and keys: dot products of their directions."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.scores.contract import Params
from attention_jax.scores.dot import Dot, WithScale

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Cosine(WithScale):
    """e(q, k) = scale (q . k) / (|q| |k|): the lengths of q and k do not matter

    A vector of zeros gives the logit 0 with derivatives 0.

    Params: {"log_scale": []} with scale = exp(log_scale), initially sqrt(Dk); {} for a fixed scale.

    Attributes:
        scale: the factor, any finite float; None to learn it. The cosine of independent random
            directions has standard deviation 1 / sqrt(Dk), so scale 1 gives nearly uniform weights.

    Source: Graves, Wayne and Danihelka 2014, section 3.3.1, equations 5 and 6 (their K is the
    cosine, their key strength beta is scale; k_t is q and a row of the memory M_t is k).

    >>> query, key = jnp.array([[3.0, 0.0]]), jnp.array([[1.0, 0.0], [0.0, 5.0], [0.0, 0.0]])
    >>> Cosine(scale=2.0)({}, query, key).round(4)
    Array([[2., 0., 0.]], dtype=float32)
    """

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        if self.scale is not None:
            return {}
        # E[(u . w)^2] = 1 / Dk for independent directions u and w.
        return {"log_scale": jnp.asarray(math.log(key_dim) / 2, float)}

    def project_query(self, params: Params, query: Array) -> Array:
        scale: Any = self.scale
        scale = jnp.exp(params["log_scale"]) if scale is None else jnp.asarray(float(scale))
        return direction(query) * scale.astype(query.dtype)

    def project_key(self, params: Params, key: Array) -> Array:
        return direction(key)


@dataclasses.dataclass(frozen=True)
class NGPT(Dot):
    """e(q, k) = sqrt(Dk) (s * q / |q|) . (s * k / |k|): a cosine with a factor for each feature

    A vector of zeros gives the logit 0 with derivatives 0, as in `Cosine`.

    Params: {"s": [Dk]}, initially ones.

    Source: Loshchilov et al. 2024, "nGPT", arXiv 2410.01131 (their s_qk is s). The paper
    normalises all weights and hidden states as well, and reports 4 to 20 times fewer steps for the
    whole.

    >>> query, key = jnp.array([[3.0, 4.0]]), jnp.array([[8.0, 6.0]])
    >>> NGPT()({"s": jnp.array([1.0, 2.0])}, query, key).round(4)  # sqrt(2) (0.48 + 1.92)
    Array([[3.3941]], dtype=float32)
    """

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {"s": jnp.ones(key_dim)}

    def project_query(self, params: Params, query: Array) -> Array:
        return math.sqrt(query.shape[-1]) * self.project_key(params, query)

    def project_key(self, params: Params, key: Array) -> Array:
        return direction(key) * params["s"][None, :].astype(key.dtype)


def direction(x: Array) -> Array:
    """x / |x| over the last axis, 0 where x is 0, for vectors of any length.

    Dividing x by its largest component first keeps the squares from overflow and underflow. The
    result does not depend on that divisor, so treating it as a constant leaves derivatives of every
    order correct.
    """
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    zero = largest == 0
    # XLA multiplies by 1 / divisor, which it rounds to 0 for the largest floats.
    shrunk = jnp.where(largest > 1, 1 / 8, 1).astype(x.dtype)
    # Replace zeros before the square root, whose infinite derivative at 0 would give 0 * inf, NaN.
    x = jnp.where(zero, 0, x * shrunk) / jnp.where(zero, 1, largest * shrunk)
    squares = jnp.where(zero, 1, jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.sqrt(squares)
