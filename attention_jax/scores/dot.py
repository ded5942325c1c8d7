"""Dot products of query and key: plain, scaled, and after a projection of the query."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_real
from attention_jax.core.products import einsum, matmul, tall_product
from attention_jax.scores.contract import Params, Score, Side, TileCost

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Dot(Score):
    """e(q, k) = q . k

    Source: Luong, Pham and Manning 2015, section 3.1, "dot" (their h_t is q, their h_s is k).

    >>> Dot()({}, jnp.array([[1.0, -0.5, 0.3, 0.8]]), jnp.array([[0.6, 0.2, -0.4, 1.0]])).round(4)
    Array([[1.18]], dtype=float32)
    """

    needs_equal_dims: ClassVar[bool] = True
    tile_cost: ClassVar[TileCost] = "matmul"
    finite_slopes: ClassVar[bool | None] = True

    def factor(self, q_features: Array) -> float:
        """What multiplies the products of features.

        A scale that is no power of two is a factor where it would round queries again.
        """
        return 1.0

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return self._scaled(einsum("td,sd->ts", q_features, k_features), q_features)

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        dlogits = self._scaled(dlogits, q_features)
        dk_features = tall_product(q_features, dlogits)
        dq_features = einsum("ts,sd->td", dlogits, k_features)
        dparams = jax.tree.map(jnp.zeros_like, params)  # `pair` uses none
        return dparams, dq_features, dk_features

    def round(self, features: Array, side: Side, dtype: Any) -> Array:
        return features.astype(dtype)

    def _scaled(self, logits: Array, q_features: Array) -> Array:
        factor = self.factor(q_features)
        return logits if factor == 1 else logits * factor


@dataclasses.dataclass(frozen=True)
class WithScale(Dot):
    """Base of dot products with a factor: any finite float, or None for the score's own."""

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            check_real("scale", self.scale)

    def scale_or(self, default: float) -> float:
        return default if self.scale is None else float(self.scale)


def without_power_of_two(scale: float) -> float:
    """|scale| / 2^n in [1, 2); 1 for 0."""
    return 2 * abs(math.frexp(scale)[0]) or 1.0


@dataclasses.dataclass(frozen=True)
class ScaledDot(WithScale):
    """e(q, k) = scale (q . k), by default with scale = 1 / sqrt(Dk)

    For independent components of mean 0 and variance 1, q . k has variance Dk and e variance 1.

    Attributes:
        scale: the factor, any finite float; None for 1 / sqrt(Dk).

    Source: Vaswani et al. 2017, equation 1.

    >>> q, k = jnp.array([[1.0, -0.5, 0.3, 0.8]]), jnp.array([[0.6, 0.2, -0.4, 1.0]])
    >>> ScaledDot()({}, q, k).round(4)
    Array([[0.59]], dtype=float32)
    """

    def project_query(self, params: Params, query: Array) -> Array:
        return query * self._scale(query.shape[-1])

    def factor(self, q_features: Array) -> float:
        narrow = q_features.dtype.itemsize == 2
        return without_power_of_two(self._scale(q_features.shape[-1])) if narrow else 1.0

    def round(self, features: Array, side: Side, dtype: Any) -> Array:
        rounded = super().round(features, side, dtype)
        if side == "key" or rounded.dtype == features.dtype:
            return rounded
        return super().round(features / self.factor(rounded), side, dtype)

    def _scale(self, size: int) -> float:
        # Dq = Dk here, so the size of the query is that of the key.
        return self.scale_or(1 / math.sqrt(size))


@dataclasses.dataclass(frozen=True)
class General(Dot):
    """e(q, k) = q . (W k): a dot product after a linear map of the query or the key

    The map is applied once per query, T Dq Dk multiplications, and not once per pair.

    Params: {"kernel": W, [Dq, Dk]}, normal with variance 1 / (Dq Dk).

    Source: Luong, Pham and Manning 2015, section 3.1, "general" (their W_a is W).

    >>> params = {"kernel": jnp.array([[0.0, 1.0], [2.0, 0.0]])}
    >>> General()(params, jnp.array([[1.0, 10.0]]), jnp.array([[3.0, 4.0]]))
    Array([[64.]], dtype=float32)
    """

    needs_equal_dims: ClassVar[bool] = False

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        # Var(sum_ij q_i W_ij k_j) = Dq Dk Var(W).
        return {
            "kernel": jax.random.normal(rng, (query_dim, key_dim)) * (query_dim * key_dim) ** -0.5
        }

    def project_query(self, params: Params, query: Array) -> Array:
        return matmul(query, params["kernel"]).astype(query.dtype)


def is_dot_product(score: Score) -> bool:
    """Whether a score inherits the `pair` of `Dot`, and so is a dot product of features."""
    return isinstance(score, Dot) and score.__class__.pair is Dot.pair  # of a `Known`, too
