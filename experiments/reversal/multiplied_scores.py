"""Scores whose logits are multiplied by a factor among the parameters, learned or constant.

The factor of the library's `Multiplied` is a constant of the program. Here it is an array, so that
one program trains models with many factors.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax.scores import Params, Score, WrappedScore

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class MultipliedScore(WrappedScore):
    """e(q, k) = factor score(q, k); a subclass makes the factor from its parameter

    Params: {"factor": [], initially `initial`; "score": those of `score`}.

    Attributes:
        score: the `Score` to multiply.
    """

    initial: ClassVar[float]
    param_shapes = Score.param_shapes
    finite_slopes = WrappedScore.finite_slopes
    round = WrappedScore.round

    def factor(self, param: Array) -> Array:
        raise NotImplementedError

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {
            "factor": jnp.float32(self.initial),
            "score": self.score.init(rng, query_dim, key_dim),
        }

    def project_query(self, params: Params, query: Array) -> Any:
        return self.score.project_query(params["score"], query)

    def project_key(self, params: Params, key: Array) -> Any:
        return self.score.project_key(params["score"], key)

    def tile_params(self, params: Params, q_features: Array) -> Params:
        return {**params, "score": self.score.tile_params(params["score"], q_features)}

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        logits = self.score.pair(params["score"], q_features, k_features)
        return self.factor(params["factor"]).astype(logits.dtype) * logits


@dataclasses.dataclass(frozen=True)
class LearnedTemperature(MultipliedScore):
    """e(q, k) = exp(t) score(q, k), with t learned from 0"""

    initial = 0.0

    def factor(self, param: Array) -> Array:
        return jnp.exp(param)


@dataclasses.dataclass(frozen=True)
class Times(MultipliedScore):
    """e(q, k) = factor score(q, k), with a factor that starts at 1 and has no gradient"""

    initial = 1.0

    def factor(self, param: Array) -> Array:
        return jax.lax.stop_gradient(param)
