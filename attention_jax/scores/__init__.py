"""Score functions, which turn a query and a key into one number, the logit.

A score has three parts: `project_query` and `project_key` run once per token, `pair` runs once per
(query, key) pair. Each is written for one example; `jax.vmap` adds the batch. The parameters are
an explicit pytree argument, so that they are differentiable and new values recompile nothing. A
`Score` is a frozen dataclass, hashable by value, so that it can be a static argument. `Score` and
the scores themselves are public names of `attention_jax`.
"""

from attention_jax.scores.additive import Additive, Concat
from attention_jax.scores.contract import Params, Score, TileCost
from attention_jax.scores.cosine import Cosine
from attention_jax.scores.distance import NegativeSquaredDistance
from attention_jax.scores.dot import Dot, General, ScaledDot, is_dot_product
from attention_jax.scores.function import CallableScore, FunctionScore
from attention_jax.scores.projected_keys import KeyLike, ProjectedKeys
from attention_jax.scores.registry import DEFAULT_SCORE, SCORES, ScoreLike, get_score, score_folder
from attention_jax.scores.wrapped import Multiplied, SoftCap, WrappedScore

__all__ = [
    "DEFAULT_SCORE",
    "SCORES",
    "Additive",
    "CallableScore",
    "Concat",
    "Cosine",
    "Dot",
    "FunctionScore",
    "General",
    "KeyLike",
    "Multiplied",
    "NegativeSquaredDistance",
    "Params",
    "ProjectedKeys",
    "ScaledDot",
    "Score",
    "ScoreLike",
    "SoftCap",
    "TileCost",
    "WrappedScore",
    "get_score",
    "is_dot_product",
    "score_folder",
]
