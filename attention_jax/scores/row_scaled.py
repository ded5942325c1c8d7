"""A factor for each row of logits: what makes one query's attention sharper than another's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from attention_jax.scores.contract import Params, Score
from attention_jax.scores.dot import ScaledDot
from attention_jax.scores.wrapped import WrappedScore

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RowScaled(WrappedScore):
    """e([q, f], k) = f score(q, k): the query's last feature multiplies its logits

    An inverse temperature that may differ from query to query and from example to example, with
    gradients, for every score whose features are single arrays: dot products could put it into q,
    others could not.

    Params: those of `score`, for queries of size Dq - 1.

    Attributes:
        score: the `Score` that makes the logits.

    >>> query, key = jnp.array([[3.0, 2.0]]), jnp.array([[1.0], [10.0]])
    >>> RowScaled(ScaledDot(1.0))({}, query, key)
    Array([[ 6., 60.]], dtype=float32)
    """

    score: Score = ScaledDot()
    pair_cost = WrappedScore.pair_cost
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
                f"query must have {expected} features, the last a factor, for keys of {key_dim} and"
                f" score {self.score}; got {query_dim}"
            )

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        q_features, k_features = self.score.project(params, query[:, :-1], key)
        if not hasattr(q_features, "ndim"):
            raise ValueError(
                f"score must have features that are one array, to be scaled; {self.score} has"
                f" {type(q_features).__name__}"
            )
        factor = query[:, -1:].astype(q_features.dtype)
        return jnp.concatenate([q_features, factor], axis=-1), k_features

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        logits = self.score.pair(params, q_features[:, :-1], k_features)
        return q_features[:, -1:].astype(logits.dtype) * logits

    # e = f l: dl = f de, df = sum_j l_j de_j.
    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        inner, factor = q_features[:, :-1], q_features[:, -1:]
        logits = self.score.pair(params, inner, k_features)
        dlogits = dlogits.astype(logits.dtype)
        dparams, dinner, dk_features = self.score.pair_vjp(
            params, inner, k_features, factor.astype(logits.dtype) * dlogits
        )
        dfactor = jnp.sum(logits * dlogits, axis=-1, keepdims=True).astype(dinner.dtype)
        return dparams, jnp.concatenate([dinner, dfactor], axis=-1), dk_features
