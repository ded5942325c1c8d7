"""The base classes of scores that change the logits of another score."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from attention_jax.scores.contract import Features, Params, Score

Array = jax.Array


def _of_inner(name: str) -> Any:
    """The attribute or method of the inner score."""
    return property(lambda self: getattr(self.score, name), doc=f"`{name}` of the inner score.")


@dataclasses.dataclass(frozen=True)
class WrappedScore(Score):
    """The parameters, features and cost of an inner score; a subclass changes its logits.

    A subclass defines `pair`, and may say what its `pair` shares with that of the inner score:

        finite_slopes = WrappedScore.finite_slopes  # infinite only where the inner score's are
        round = WrappedScore.round                  # it reads the features as the inner one does
        tile_params = WrappedScore.tile_params      # it hands its features to the inner one

    Without such a line it has the default of `Score`, which is right for every `pair`. It sets its
    own `tile_cost` if its `pair` costs more than the inner one. It defines `init`, `param_shapes`,
    `project_query` and `project_key` if its parameters differ from those of the inner score.

    Attributes:
        score: the inner `Score`.
    """

    score: Score

    def __post_init__(self) -> None:
        if not isinstance(self.score, Score):
            raise ValueError(f"score must be a Score; got {self.score!r} (see get_score)")

    needs_equal_dims = _of_inner("needs_equal_dims")
    tile_cost = _of_inner("tile_cost")
    finite_slopes = _of_inner("finite_slopes")
    translation_invariant = _of_inner("translation_invariant")
    init = _of_inner("init")
    param_shapes = _of_inner("param_shapes")
    project_query = _of_inner("project_query")
    project_key = _of_inner("project_key")
    round = _of_inner("round")
    tile_params = _of_inner("tile_params")


class LogitMap(WrappedScore):
    """e(q, k) = map_logits(score(q, k)): a subclass defines the elementwise `map_logits`.

    Its slope must be finite at every finite logit.
    """

    finite_slopes = WrappedScore.finite_slopes
    translation_invariant = WrappedScore.translation_invariant
    round = WrappedScore.round
    tile_params = WrappedScore.tile_params

    def map_logits(self, logits: Array) -> Array:
        """The logits [t, s] of this score, from those of the inner score."""
        raise NotImplementedError(f"{type(self).__name__} must define map_logits(logits)")

    def pair(self, params: Params, q_features: Features, k_features: Features) -> Array:
        return self.map_logits(self.score.pair(params, q_features, k_features))

    def pair_vjp(
        self, params: Params, q_features: Features, k_features: Features, dlogits: Array
    ) -> tuple[Params, Features, Features]:
        inner = self.score.pair(params, q_features, k_features)
        logits, pull_back = jax.vjp(self.map_logits, inner)
        (dinner,) = pull_back(dlogits.astype(logits.dtype))
        return self.score.pair_vjp(params, q_features, k_features, dinner)
