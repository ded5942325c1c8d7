"""`SoftCap`, which bounds the logits of any score."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_real
from attention_jax.scores.contract import Score
from attention_jax.scores.dot import ScaledDot
from attention_jax.scores.wrapped import LogitMap

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SoftCap(LogitMap):
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
        check_real("cap", self.cap, above=0)

    def map_logits(self, logits: Array) -> Array:
        cap = float(self.cap)
        return cap * jnp.tanh(logits / cap)
