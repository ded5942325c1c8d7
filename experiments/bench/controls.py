"""Scores between dot products and additive attention: which part of a score makes a difference?"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.products import matmul
from attention_jax.scores import Params, ScaledDot, Score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Projected(ScaledDot):
    """e(q, k) = (Wq q) . (Wk k) / sqrt(A): scaled dot with as many kernels as additive attention

    Params: {"query_kernel": Wq, [Dq, A]; "key_kernel": Wk, [Dk, A]}, which keep unit variance.

    Attributes:
        hidden_dim: A; None takes Dk.
    """

    needs_equal_dims: ClassVar[bool] = False
    hidden_dim: int | None = None

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        width = self.hidden_dim or key_dim
        shapes = {"query_kernel": (query_dim, width), "key_kernel": (key_dim, width)}
        rngs = jax.random.split(rng)
        return {
            name: jax.random.normal(rng, shape) * shape[0] ** -0.5
            for rng, (name, shape) in zip(rngs, shapes.items(), strict=True)
        }

    def project_query(self, params: Params, query: Array) -> Array:
        projected = matmul(query, params["query_kernel"]).astype(query.dtype)
        return super().project_query(params, projected)  # scales

    def project_key(self, params: Params, key: Array) -> Array:
        return matmul(key, params["key_kernel"]).astype(key.dtype)


@dataclasses.dataclass(frozen=True)
class Features(Projected):
    """e(q, k) = relu(Wq q) . relu(Wk k) / sqrt(A): a dot product of the features of two perceptrons

    Params and attributes as in `Projected`.
    """

    def project_query(self, params: Params, query: Array) -> Array:
        return jax.nn.relu(super().project_query(params, query))

    def project_key(self, params: Params, key: Array) -> Array:
        return jax.nn.relu(super().project_key(params, key))


@dataclasses.dataclass(frozen=True)
class WithLength(Score):
    """e(q, k) = (q . k + w |k|^2) / sqrt(D): scaled dot and one learned number

    Params: {"w": [], initially 0}.
    """

    needs_equal_dims: ClassVar[bool] = True

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        del rng, query_dim, key_dim
        return {"w": jnp.zeros(())}

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        lengths = jnp.sum(jnp.square(k_features), axis=-1)
        logits = matmul(q_features, k_features.T) + params["w"] * lengths
        return (logits * k_features.shape[-1] ** -0.5).astype(q_features.dtype)
