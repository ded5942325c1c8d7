"""Scores made of another score: what they share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from attention_jax.scores.contract import PairCost, Params, Score

Array = jax.Array


def check_inner_score(score: Any) -> None:
    """Raises ValueError, with what to write instead, unless it is a `Score`."""
    if isinstance(score, Score):
        return
    hint = ""
    if isinstance(score, type) and issubclass(score, Score):
        hint = f": write {score.__name__}()"
    elif isinstance(score, str) or callable(score):
        written = repr(score) if isinstance(score, str) else getattr(score, "__name__", "function")
        hint = f": write get_score({written})"
    raise ValueError(f"score must be a Score; got {score!r}{hint}")


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
        check_inner_score(self.score)

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
