"""Negative squared distances of query and key, computed as dot products."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.scores.contract import Params, Side
from attention_jax.scores.dot import WithScale, without_power_of_two

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class NegativeSquaredDistance(WithScale):
    """e(q, k) = -scale |q - k|^2, by default with scale = 1 / sqrt(8 Dk)

    Its softmax weights keys by a Gaussian around the query, of variance 1 / (2 scale).

    It is computed as a dot product of Dk + 4 features,

        f [p q, a, a', 1, 1] . [k, 1, 1, b, b'],  a + a' = -p |q|^2 / 2,  b + b' = -p |k|^2 / 2,

    where f p = 2 scale, p is a power of two and 1 <= f < 2, so that it costs as much as `Dot`.
    Before that, attention subtracts the mean c of the keys from all tokens, in each feature where
    it is far from 0 (`scores/origin.py`). The rounding error is that of the three terms, of the
    order of eps scale (|q - c|^2 + |k - c|^2) with eps = 1.2e-7 in float32. It is large relative to
    the logit only for tokens that are much closer to each other than to c: where keys form distant
    groups, such as packed sequences of different offsets. e(q, q) may differ from 0 by this error,
    with either sign.

    Attributes:
        scale: the factor, any finite float; None for 1 / sqrt(8 Dk).

    Source: Tsai et al. 2019, "Transformer Dissection", the RBF kernel (there of projected tokens).

    >>> NegativeSquaredDistance(scale=0.5)({}, jnp.array([[1.0, 2.0]]), jnp.array([[4.0, 6.0]]))
    Array([[-12.5]], dtype=float32)
    """

    translation_invariant: ClassVar[bool] = True

    def project_query(self, params: Params, query: Array) -> Array:
        query = query.astype(accumulator_dtype(query))  # the three terms may cancel
        power = self._power(query.shape[-1])
        squares = -power / 2 * jnp.sum(query * query, axis=-1, keepdims=True)
        ones = jnp.ones_like(squares)
        return jnp.concatenate([power * query, *_two_parts(squares), ones, ones], axis=-1)

    def project_key(self, params: Params, key: Array) -> Array:
        key = key.astype(accumulator_dtype(key))
        power = self._power(key.shape[-1])
        squares = -power / 2 * jnp.sum(key * key, axis=-1, keepdims=True)
        ones = jnp.ones_like(squares)
        return jnp.concatenate([key, ones, ones, *_two_parts(squares)], axis=-1)

    def factor(self, q_features: Array) -> float:
        return without_power_of_two(2 * self._scale(q_features.shape[-1] - 4))

    # A square rounded to bfloat16 may be wrong by more than the logit, so it is two features: its
    # rounded value and the remainder. It is the square of the rounded token: the logit is then that
    # of two tokens near the given ones, and not the difference of two that were rounded apart.
    # (The squares of float16 may exceed the largest float16.)

    def round(self, features: Array, side: Side, dtype: Any) -> Array:
        if dtype != jnp.bfloat16 or features.dtype.itemsize == 2:
            return features
        tokens, squares, ones = features[:, :-4], features[:, -4:-2], features[:, -2:]
        if side == "key":
            squares, ones = ones, squares
        power = self._power(tokens.shape[-1])
        unit = power or 1.0 if side == "query" else 1.0  # that of the tokens
        rounded = _bfloat16(tokens)
        lost = jnp.sum((tokens - rounded) * (tokens + rounded), axis=-1, keepdims=True)
        squares = jnp.sum(squares, axis=-1, keepdims=True) + power / 2 / unit**2 * lost
        parts = [*_two_parts(squares), ones]
        rest = parts if side == "query" else [ones, *parts[:2]]
        return jnp.concatenate([rounded, *rest], axis=-1).astype(dtype)

    def _power(self, size: int) -> float:
        """2 scale / factor, a power of two or 0: it rounds no token."""
        scale = 2 * self._scale(size)
        return scale / without_power_of_two(scale)

    def _scale(self, size: int) -> float:
        # A normal component of q - k has mean 0 and variance 2. Its square has variance
        # 2 * 2^2 = 8, and the sum of Dk squares variance 8 Dk. (Dq = Dk here.)
        return self.scale_or(1 / math.sqrt(8 * size))


def _two_parts(x: Array) -> tuple[Array, Array]:
    """x as a sum of two numbers that bfloat16 holds, to 16 bits; the first has x's derivative."""
    remainder = jax.lax.stop_gradient(x - _bfloat16(x))
    return x - remainder, remainder


def _bfloat16(x: Array) -> Array:
    """x rounded to bfloat16. XLA would remove a pair of conversions by `astype`."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@dataclasses.dataclass(frozen=True)
class L2(NegativeSquaredDistance):
    """e(q, k) = -|q - k|^2 / sqrt(Dk): `NegativeSquaredDistance` with the constant of the paper

    Attributes:
        scale: a factor in place of 1 / sqrt(Dk), any finite float.

    Source: Kim, Papamakarios and Mnih 2020, arXiv 2006.04710. They show that self attention with
    dot products is not Lipschitz, and that it is with this score if queries and keys share one
    projection.

    >>> L2()({}, jnp.array([[1.0, 2.0, 0.0, 0.0]]), jnp.array([[4.0, 6.0, 0.0, 0.0]]))
    Array([[-12.5]], dtype=float32)
    """

    def _scale(self, size: int) -> float:
        return self.scale_or(1 / math.sqrt(size))


@dataclasses.dataclass(frozen=True)
class Elliptical(L2):
    """e(q, k) = -sum_d m_d (q_d - k_d)^2 / sqrt(Dk): a distance with a weight for each feature

    Params: {"log_m": [Dk]} with m = exp(log_m), initially zeros.

    Attributes:
        scale: a factor in place of 1 / sqrt(Dk), any finite float.

    Source: Nielsen et al. 2024, "Elliptical Attention", arXiv 2406.13770. There m is not learned,
    but estimated from the values of the layers before. They report robustness and less collapse of
    representations.

    >>> params = {"log_m": jnp.log(jnp.array([4.0, 1.0, 1.0, 1.0]))}
    >>> query, key = jnp.array([[1.0, 2.0, 0.0, 0.0]]), jnp.array([[4.0, 6.0, 0.0, 0.0]])
    >>> Elliptical()(params, query, key).round(4)  # (4 * 9 + 16) / 2
    Array([[-26.]], dtype=float32)
    """

    translation_invariant: ClassVar[bool] = True

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {"log_m": jnp.zeros(key_dim)}

    def project_query(self, params: Params, query: Array) -> Array:
        return super().project_query(params, _stretched(params, query))

    def project_key(self, params: Params, key: Array) -> Array:
        return super().project_key(params, _stretched(params, key))


def _stretched(params: Params, tokens: Array) -> Array:
    return tokens * jnp.exp(params["log_m"] / 2)[None, :].astype(tokens.dtype)
