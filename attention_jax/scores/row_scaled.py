"""`RowScaled`, a score with a factor for each row of logits, which sharpens or flattens it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.scores.contract import Params, Score
from attention_jax.scores.dot import ScaledDot
from attention_jax.scores.wrapped import WrappedScore

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RowScaled(WrappedScore):
    """e([q, f], k) = f score(q, k): the query's last feature multiplies its logits

    The factor is an inverse temperature. It may differ between queries and between examples, and it
    is differentiable.

    Params: those of `score`, for queries of size Dq - 1.

    Attributes:
        score: the `Score` whose logits are multiplied.

    >>> query, key = jnp.array([[3.0, 2.0]]), jnp.array([[1.0], [10.0]])
    >>> RowScaled(ScaledDot(1.0))({}, query, key)
    Array([[ 6., 60.]], dtype=float32)
    """

    score: Score = ScaledDot()
    finite_slopes = WrappedScore.finite_slopes

    @property
    def needs_equal_dims(self) -> bool:  # type: ignore[override]
        return False

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        self._check_dims(query_dim, key_dim)
        return self.score.init(rng, query_dim - 1, key_dim)

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        self._check_dims(query_dim, key_dim)
        return self.score.param_shapes(params, query_dim - 1, key_dim)

    def _check_dims(self, query_dim: int, key_dim: int) -> None:
        equal = self.score.needs_equal_dims
        if query_dim < 2 or (equal and query_dim != key_dim + 1):
            expected = f"{key_dim + 1}" if equal else "at least 2"
            raise ValueError(
                f"query must have {expected} features, the last of them the factor, for keys of"
                f" {key_dim} and score {self.score}; got {query_dim}"
            )

    def project_query(self, params: Params, query: Array) -> tuple[Any, Array]:
        return self.score.project_query(params, query[:, :-1]), query[:, -1:]

    def pair(self, params: Params, q_features: tuple[Any, Array], k_features: Any) -> Array:
        inner_features, factor = q_features
        logits = self.score.pair(params, inner_features, k_features)
        return factor.astype(logits.dtype) * logits

    # e = f l: dl = f de, df = sum_j l_j de_j.
    def pair_vjp(
        self, params: Params, q_features: tuple[Any, Array], k_features: Any, dlogits: Array
    ) -> tuple[Params, tuple[Any, Array], Any]:
        inner_features, factor = q_features
        logits = self.score.pair(params, inner_features, k_features)
        dlogits = dlogits.astype(logits.dtype)
        dparams, dinner_features, dk_features = self.score.pair_vjp(
            params, inner_features, k_features, factor.astype(logits.dtype) * dlogits
        )
        dfactor = jnp.sum(logits * dlogits, axis=-1, keepdims=True).astype(factor.dtype)
        return dparams, (dinner_features, dfactor), dk_features
