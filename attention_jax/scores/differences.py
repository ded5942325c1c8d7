"""Scores of the differences q_d - k_d of all features, in an array [t, s, F] for each tile."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_real
from attention_jax.core.products import einsum
from attention_jax.scores.contract import Params, Score

Array = jax.Array


def _differences(queries: Array, keys: Array) -> Array:
    """[t, F] and [s, F] -> [t, s, F]"""
    return queries[:, None, :] - keys[None, :, :]


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
        differences = _differences(q_features, k_features)
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
        differences = _differences(q_features, k_features)
        return differences.min(-1) - differences.max(-1)


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
        squares = jnp.square(_differences(q_features, k_features)).sum(-1)
        products = einsum("td,sd->ts", q_features, k_features)
        return jnp.log(products * products + 1e-12) - jnp.log(squares + self.epsilon)


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
        differences = _differences(q_features, k_features)
        excess = _hyperbolic_excess(q_features, k_features, differences) + 1e-12
        distances = jnp.log1p(excess + jnp.sqrt(excess * (excess + 2)))  # arcosh(1 + excess)
        return -jnp.exp(params["log_beta"]).astype(distances.dtype) * distances


def _hyperbolic_excess(queries: Array, keys: Array, differences: Array) -> Array:
    """h(q) h(k) - q . k - 1 >= 0 with h(x) = sqrt(1 + |x|^2), see `Hyperbolic`: [t, s]

    Args:
        queries: [t, F].
        keys: [s, F].
        differences: q - k, [t, s, F].
    """
    squares = jnp.square(differences).sum(-1)
    products = (queries[:, None, :] * keys[None, :, :]).sum(-1)
    q_square, k_square = jnp.square(queries).sum(-1)[:, None], jnp.square(keys).sum(-1)[None, :]
    # G = |x|^2 |r|^2 with the longer token x, and r the part across x of the other token or, if it
    # is shorter, of the difference. Where x is short, G is |x|^2 |y|^2 - (x . y)^2.
    is_query, tokens = q_square >= k_square, (queries[:, None, :], keys[None, :, :])
    square, other_square = jnp.where(is_query, q_square, k_square), jnp.minimum(q_square, k_square)
    longer = jnp.where(is_query[:, :, None], *tokens)
    other = jnp.where(is_query[:, :, None], *tokens[::-1])
    is_near = jax.lax.stop_gradient(squares < other_square)
    other = jnp.where(is_near[:, :, None], differences, other)
    along = (longer * other).sum(-1)
    is_long = square > 1
    shares = along / jnp.where(is_long, square, 1)
    rest = other - shares[:, :, None] * longer
    # Once more: what the first step leaves along x is rounding, of which the gradient is not.
    left = (longer * rest).sum(-1) / jnp.where(is_long, square, 1)
    across = jnp.square(rest - left[:, :, None] * longer).sum(-1)
    heights = jnp.sqrt(1 + q_square) * jnp.sqrt(1 + k_square)
    opposite = products < -1  # then the formula of the first line loses nothing
    divisor = 1 + heights + jnp.where(opposite, 0, products)
    short = jnp.where(is_long, 0, square) * jnp.square(other).sum(-1) - along * shares
    gram = jnp.where(is_long, square / divisor * across, short / divisor)  # G may overflow
    return jnp.where(opposite, heights - products - 1, squares / divisor + gram)
