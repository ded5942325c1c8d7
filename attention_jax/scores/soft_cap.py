"""`SoftCap`, which bounds the logits of any score."""

from __future__ import annotations

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp

from attention_jax.scores.contract import Params, Score
from attention_jax.scores.dot import ScaledDot
from attention_jax.scores.wrapped import WrappedScore

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SoftCap(WrappedScore):
    """e(q, k) = cap tanh(score(q, k) / cap): the logits of a score, bounded by cap in size

    Logits much smaller than cap hardly change; the gradient of much larger logits vanishes.

    Params: those of `score`.

    Attributes:
        score: the `Score` whose logits are bounded.
        cap: the bound, a finite float above 0.

    Source: Gemma Team 2024 ("Gemma 2"), section 2, logit soft-capping (their soft_cap is cap, 50
    for attention).

    >>> query, key = jnp.array([[1.0]]), jnp.array([[1.0], [100.0]])
    >>> SoftCap(ScaledDot(1.0), cap=2.0)({}, query, key).round(4)
    Array([[0.9242, 2.    ]], dtype=float32)
    """

    score: Score = ScaledDot()
    cap: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.cap, numbers.Real) and 0 < self.cap < math.inf):
            raise ValueError(f"cap must be a finite float above 0; got {self.cap!r}")

    finite_slopes = WrappedScore.finite_slopes
    round = WrappedScore.round
    tile_params = WrappedScore.tile_params

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return float(self.cap) * self._tanh(params, q_features, k_features)

    # de/dlogit = 1 - tanh^2.
    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        tanh = self._tanh(params, q_features, k_features)
        dlogits = dlogits.astype(tanh.dtype) * (1 - tanh * tanh)
        return self.score.pair_vjp(params, q_features, k_features, dlogits)

    def _tanh(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return jnp.tanh(self.score.pair(params, q_features, k_features) / float(self.cap))
