"""Scores made of another score: what they share."""

from __future__ import annotations

import dataclasses

import jax

from attention_jax.scores.contract import PairCost, Params, Score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class WrappedScore(Score):
    """Another score with its parameters, features and cost: a subclass changes its logits.

    It defines `pair`; says `pair_cost = WrappedScore.pair_cost` and `finite_slopes =
    WrappedScore.finite_slopes` where these still hold; and defines `init`, `project` and
    `param_shapes` where its parameters are others.

    Attributes:
        score: the `Score` that is made another of.
    """

    score: Score

    def __post_init__(self) -> None:
        if not isinstance(self.score, Score):
            raise ValueError(f"score must be a Score; got {self.score!r}")

    @property
    def needs_equal_dims(self) -> bool:  # type: ignore[override]
        return self.score.needs_equal_dims

    @property
    def pair_cost(self) -> PairCost:  # type: ignore[override]
        return self.score.pair_cost

    @property
    def finite_slopes(self) -> bool | None:  # type: ignore[override]
        return self.score.finite_slopes

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return self.score.init(rng, query_dim, key_dim)

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        return self.score.param_shapes(params, query_dim, key_dim)

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        return self.score.project(params, query, key)
