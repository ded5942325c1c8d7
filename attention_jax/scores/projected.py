"""A score of tokens that have been projected before: what a decoder that keeps its keys needs."""

from __future__ import annotations

import dataclasses
import numbers

import jax

from attention_jax.scores.contract import PairCost, Params, Score
from attention_jax.scores.wrapped import check_inner_score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ProjectedScore(Score):
    """e(x, y) = score.pair(x, y), where x, y = score.project(q, k) has been done before

    For decoding token by token: keys are projected once, kept, and given as `key` in every step.
    It is for scores whose features are single arrays, [T, Fq] and [S, Fk], as those of all scores
    here are.

    Params: those of `score`, for tokens of sizes Dq and Dk.

    Attributes:
        score: the `Score` whose `project` made the features.
        query_dim: Dq, the size of the queries before they were projected.
        key_dim: Dk.

    >>> from attention_jax.scores import Additive
    >>> score = Additive(hidden_dim=4)
    >>> params = score.init(jax.random.key(0), query_dim=2, key_dim=3)
    >>> query, key = jax.numpy.ones((5, 2)), jax.numpy.ones((7, 3))
    >>> features = score.project(params, query, key)
    >>> logits = ProjectedScore(score, query_dim=2, key_dim=3)(params, *features)
    >>> bool((logits == score(params, query, key)).all())
    True
    """

    score: Score
    query_dim: int
    key_dim: int

    def __post_init__(self) -> None:
        check_inner_score(self.score)
        for name in ("query_dim", "key_dim"):
            size: int = getattr(self, name)
            if not (isinstance(size, numbers.Integral) and size >= 1):
                raise ValueError(f"{name} must be an integer of at least 1; got {size!r}")
        if self.score.needs_equal_dims and self.query_dim != self.key_dim:
            raise ValueError(
                f"key_dim must be {self.query_dim} to match score {self.score} with query_dim"
                f" {self.query_dim}; got {self.key_dim}"
            )

    @property
    def pair_cost(self) -> PairCost:  # type: ignore[override]
        return self.score.pair_cost

    @property
    def finite_slopes(self) -> bool | None:  # type: ignore[override]
        return self.score.finite_slopes

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        del query_dim, key_dim  # of the features
        return self.score.init(rng, self.query_dim, self.key_dim)

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        del query_dim, key_dim
        return self.score.param_shapes(params, self.query_dim, self.key_dim)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        return self.score.pair(params, q_features, k_features)

    def pair_vjp(
        self, params: Params, q_features: Array, k_features: Array, dlogits: Array
    ) -> tuple[Params, Array, Array]:
        return self.score.pair_vjp(params, q_features, k_features, dlogits)
