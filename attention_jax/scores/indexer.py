"""The lightning indexer: a sum over heads of rectified dot products."""

import dataclasses

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer
from attention_jax.core.products import einsum, matmul
from attention_jax.scores.contract import Params, Score

Array = jax.Array


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
