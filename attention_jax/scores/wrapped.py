"""`WrappedScore`, the base class of scores that change the logits of another score."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from attention_jax.scores.contract import Params, Score, TileCost

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class WrappedScore(Score):
    """The parameters, features and cost of an inner score; a subclass changes its logits.

    A subclass defines `pair`, and says what holds for it:

        finite_slopes = WrappedScore.finite_slopes  # infinite only where those of the inner one are
        round = WrappedScore.round                  # it reads the features as the inner one does
        tile_params = WrappedScore.tile_params      # it hands its features to the inner one

    or `Score.finite_slopes`, ... where that does not hold. It sets its own `tile_cost` if its
    `pair` costs more than the inner one. It defines `init`, `param_shapes`, `project_query` and
    `project_key` if its parameters differ from those of the inner score.

    Attributes:
        score: the inner `Score`.
    """

    score: Score

    def __post_init__(self) -> None:
        if not isinstance(self.score, Score):
            raise ValueError(f"score must be a Score; got {self.score!r} (see get_score)")

    @property
    def needs_equal_dims(self) -> bool:  # type: ignore[override]
        """That of the inner score."""
        return self.score.needs_equal_dims

    @property
    def tile_cost(self) -> TileCost:  # type: ignore[override]
        """That of the inner score."""
        return self.score.tile_cost

    @property
    def finite_slopes(self) -> bool | None:  # type: ignore[override]
        """That of the inner score."""
        return self.score.finite_slopes

    def tile_params(self, params: Params, q_features: Any) -> Params:
        return self.score.tile_params(params, q_features)

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return self.score.init(rng, query_dim, key_dim)

    def param_shapes(self, params: Params, query_dim: int, key_dim: int) -> Params:
        return self.score.param_shapes(params, query_dim, key_dim)

    def project_query(self, params: Params, query: Array) -> Any:
        return self.score.project_query(params, query)

    def project_key(self, params: Params, key: Array) -> Any:
        return self.score.project_key(params, key)

    def round(self, features: Any, dtype: Any) -> Any:
        return self.score.round(features, dtype)
