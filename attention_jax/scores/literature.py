"""Scores from the literature, in a few lines each, with the constants of their papers.

Each one changes the logit alone. Where a paper also changes the normaliser, the values or the
layers around attention, the docstring says so: the paper's claims are about the whole.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer, check_real
from attention_jax.core.products import einsum, matmul
from attention_jax.scores.additive import Additive
from attention_jax.scores.contract import Params, Score
from attention_jax.scores.cosine import direction
from attention_jax.scores.distance import NegativeSquaredDistance, hyperbolic_excess
from attention_jax.scores.dot import Dot, ScaledDot
from attention_jax.scores.wrapped import LogitMap

Array = jax.Array


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


@dataclasses.dataclass(frozen=True)
class Neural(Additive):
    """e(q, k) = v . relu(Wq q + Wk k + b): `Additive` with another nonlinearity and a bias

    Params: {"query_kernel": Wq, [Dq, A]; "key_kernel": Wk, [Dk, A]; "bias": b, [A]; "v": [A]},
    initially those of `Additive`, with b = 0.

    Attributes:
        hidden_dim: A, at least 1. None takes A from the given parameters, or Dk in `init`.

    Source: DiGiugno and Mahmood 2025, "Neural Attention", arXiv 2502.17206. They report a
    perplexity that is 2 per cent lower than with dot products. Their code has one more hidden
    layer, and keeps the hidden layers of all pairs in memory.

    >>> params = {"query_kernel": jnp.eye(2), "key_kernel": jnp.eye(2)}
    >>> params |= {"bias": jnp.array([0.0, -1.0]), "v": jnp.array([1.0, -1.0])}
    >>> Neural()(params, jnp.array([[0.5, 0.0]]), jnp.array([[0.5, 3.0], [-2.0, 3.0]]))
    Array([[-1., -2.]], dtype=float32)
    """

    tile_cost = "materialized"
    finite_slopes = True

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        params = super().init(rng, query_dim, key_dim)
        return {**params, "bias": jnp.zeros_like(params["v"])}

    def project_query(self, params: Params, query: Array) -> Array:
        return super().project_query(params, query) + params["bias"][None, :].astype(query.dtype)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        hidden = jax.nn.relu(q_features[:, None, :] + k_features[None, :, :])
        return jnp.sum(params["v"][None, None, :].astype(hidden.dtype) * hidden, axis=-1)


@dataclasses.dataclass(frozen=True)
class Yat(Score):
    """e(q, k) = log((q . k)^2 / (|q - k|^2 + epsilon)): aligned and near

    The softmax makes the weights proportional to the fraction. Its numerator is (q . k)^2 + 1e-12,
    so that the logit of orthogonal tokens and its gradient are finite.

    Attributes:
        epsilon: a finite float above 0.

    Source: the kernel of Bouhsine 2025, as in Luna, Bouhsine and Choromanski 2026, "SLAY", arXiv
    2602.04915, who restrict it to unit vectors, approximate it in linear time, and report results
    near those of softmax attention.

    >>> logits = Yat()({}, jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 1.0]]))
    >>> f"{logits[0, 0]:.4f}"  # log(25 / 5)
    '1.6094'
    """

    needs_equal_dims = True
    finite_slopes = True
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_real("epsilon", self.epsilon, above=0)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        squares = jnp.square(_feature_differences(q_features, k_features)).sum(-1)
        products = einsum("td,sd->ts", q_features, k_features)
        return _log_square(products) - jnp.log(squares + self.epsilon)


@dataclasses.dataclass(frozen=True)
class Manhattan(Score):
    """e(q, k) = -sum_d |q_d - k_d| / sqrt(Dk)

    Source: Brännvall 2023, "The Inhibitor", arXiv 2310.02041, for cheaper arithmetic. There the
    distance is subtracted from the values, in place of a softmax.

    >>> query, key = jnp.array([[1.0, 2.0, 0.0, 0.0]]), jnp.array([[3.0, 2.5, 0.0, 0.0]])
    >>> Manhattan()({}, query, key)
    Array([[-1.25]], dtype=float32)
    """

    needs_equal_dims = True

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        differences = _feature_differences(q_features, k_features)
        sizes = differences * jnp.sign(differences)  # `abs` has the derivative 1 at 0
        return -sizes.sum(-1) / math.sqrt(k_features.shape[-1])


@dataclasses.dataclass(frozen=True)
class Tropical(Score):
    """e(q, k) = -(max_d (q_d - k_d) - min_d (q_d - k_d)): tropical Hilbert distance

    A number that is added to all features of a token changes nothing.

    Source: Hashemi et al. 2025, "Tropical Attention", arXiv 2505.17190, who report that it extends
    to longer inputs of combinatorial algorithms. There projections and weighted sums are maxima
    too.

    >>> Tropical()({}, jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[0.0, 0.0, 4.0]]))  # -(2 - -1)
    Array([[-3.]], dtype=float32)
    """

    needs_equal_dims = True

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        differences = _feature_differences(q_features, k_features)
        return differences.min(-1) - differences.max(-1)


@dataclasses.dataclass(frozen=True)
class Hyperbolic(Score):
    """e(q, k) = -beta arcosh(sqrt(1 + |q|^2) sqrt(1 + |k|^2) - q . k): hyperbolic distance

    A token x is the point (x, h(x)) of the hyperboloid, with h(x) = sqrt(1 + |x|^2). The argument
    of arcosh is 1 + (|q - k|^2 + G) / (1 + h(q) h(k) + q . k) with G = |q|^2 |k|^2 - (q . k)^2,
    computed from differences and without cancellation, so that near tokens and tokens far from 0
    keep their digits. 1e-12 is added, which keeps derivatives finite where q = k.

    Params: {"log_beta": []} with beta = exp(log_beta), initially 1.

    Source: Gulcehre et al. 2018, "Hyperbolic Attention Networks", arXiv 1805.09786, for data with
    hierarchies. They average the values in hyperbolic space too.

    >>> query, key = jnp.array([[3 / 4]]), jnp.array([[4 / 3]])
    >>> Hyperbolic()({"log_beta": jnp.zeros(())}, query, key).round(4)  # log(2) - log(3)
    Array([[-0.4055]], dtype=float32)
    """

    needs_equal_dims = True
    finite_slopes = True

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {"log_beta": jnp.zeros(())}

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        differences = _feature_differences(q_features, k_features)
        excess = hyperbolic_excess(q_features, k_features, differences) + 1e-12
        distances = jnp.log1p(excess + jnp.sqrt(excess * (excess + 2)))  # arcosh(1 + excess)
        return -jnp.exp(params["log_beta"]).astype(distances.dtype) * distances


@dataclasses.dataclass(frozen=True)
class Indexer(Score):
    """e(q, k) = sum_h w_h relu(q_h . k'), where q_h = Wq_h q, k' = Wk k and w = Ww q

    Params: {"query_kernel": all Wq_h side by side, [Dq, H * Dk]; "key_kernel": Wk, [Dk, Dk];
    "weight_kernel": Ww, [Dq, H]}.

    Attributes:
        num_heads: H, at least 1.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", equation 1: the lightning indexer, whose largest
    logits pick the keys that sparse attention reads. Here it is a score like any other.

    >>> eye = jnp.eye(2)
    >>> params = {"query_kernel": jnp.hstack([eye, -eye]), "key_kernel": eye, "weight_kernel": eye}
    >>> Indexer(2)(params, jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 1.0], [-3.0, -1.0]]))
    Array([[ 5., 10.]], dtype=float32)
    """

    finite_slopes = True
    num_heads: int = 4

    def __post_init__(self) -> None:
        check_integer("num_heads", self.num_heads)

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        heads, rngs = self.num_heads, jax.random.split(rng, 3)
        shapes = (query_dim, heads * key_dim), (key_dim, key_dim), (query_dim, heads)
        variances = 1 / (query_dim * key_dim), 1 / key_dim, 2 / (query_dim * heads)
        kernels = map(jax.random.normal, rngs, shapes)
        names = ("query_kernel", "key_kernel", "weight_kernel")
        return {n: k * v**0.5 for n, k, v in zip(names, kernels, variances, strict=True)}

    def project_query(self, params: Params, query: Array) -> tuple[Array, Array]:
        queries = matmul(query, params["query_kernel"]).astype(query.dtype)
        weights = matmul(query, params["weight_kernel"]).astype(query.dtype)
        heads = weights.shape[-1]
        return queries.reshape(len(query), heads, queries.shape[-1] // heads), weights

    def project_key(self, params: Params, key: Array) -> Array:
        return matmul(key, params["key_kernel"]).astype(key.dtype)

    def pair(self, params: Params, q_features: tuple[Array, Array], k_features: Array) -> Array:
        queries, weights = q_features
        products = jax.nn.relu(einsum("thd,sd->ths", queries, k_features))
        return jnp.sum(weights[:, :, None].astype(products.dtype) * products, axis=1)


@dataclasses.dataclass(frozen=True)
class Power(LogitMap):
    """e(q, k) = degree log |score(q, k)|: weights proportional to a power of another score

    It is computed as degree / 2 log(score(q, k)^2 + 1e-12), so that logits and gradients are
    finite.

    Params: those of `score`.

    Attributes:
        score: the `Score` inside, by default q . k.
        degree: any finite float.

    Source: Buckman, Gelada and Zhang 2024, "Symmetric Power Transformers", where an even degree
    makes the weights a kernel with finitely many features, and hence a recurrent network.

    >>> Power()({}, jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 1.0]])).round(4)  # log(25)
    Array([[3.2189]], dtype=float32)
    """

    score: Score = Dot()
    degree: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("degree", self.degree)

    def map_logits(self, logits: Array) -> Array:
        return self.degree / 2 * _log_square(logits)


@dataclasses.dataclass(frozen=True)
class Softplus(LogitMap):
    """e(q, k) = log softplus(score(q, k)): weights that grow linearly instead of exponentially

    Params: those of `score`.

    Attributes:
        score: the `Score` inside, by default q . k / sqrt(Dk).

    Source: Gao and Spratling 2025, "Softplus Attention", arXiv 2501.13428. With a factor that
    depends on the length, and sharpened weights, they report extrapolation to 16 times the length
    of training.

    >>> query, key = jnp.array([[2.0, 0.0, 0.0, 0.0]]), jnp.array([[1.0, 0.0, 0.0, 0.0]])
    >>> f"{Softplus()({}, query, key)[0, 0]:.4f}"  # log(log(1 + e))
    '0.2725'
    """

    score: Score = ScaledDot()

    def map_logits(self, logits: Array) -> Array:
        # log softplus(x) = x to the last digit below -40, where softplus(x) may be 0 in float32.
        small = logits < -40
        return jnp.where(small, logits, jnp.log(jax.nn.softplus(jnp.where(small, 0, logits))))


def _feature_differences(queries: Array, keys: Array) -> Array:
    """[t, F] and [s, F] -> [t, s, F]"""
    return queries[:, None, :] - keys[None, :, :]


def _log_square(x: Array) -> Array:
    return jnp.log(x * x + 1e-12)


LITERATURE: dict[str, Score] = {
    "elliptical": Elliptical(),
    "hyperbolic": Hyperbolic(),
    "indexer": Indexer(),
    "l2": L2(),
    "manhattan": Manhattan(),
    "neural": Neural(),
    "ngpt": NGPT(),
    "power": Power(),
    "softplus": Softplus(),
    "tropical": Tropical(),
    "yat": Yat(),
}
