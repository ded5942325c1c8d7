"""Score functions: a query and a key become one number, the logit. This folder is the mathematics.

A score splits in two: `project` runs once per token, `pair` once per (query, key) pair. Both are
written for one example; batches come from `jax.vmap`. Parameters are an explicit pytree, so that
gradients reach them and a new value recompiles nothing; the `Score` itself is a frozen dataclass,
hashable by value, so that it can be a static argument.
"""

from attention_jax.scores.additive import Additive, Concat
from attention_jax.scores.contract import PairCost, Params, Score
from attention_jax.scores.cosine import Cosine
from attention_jax.scores.distance import NegativeSquaredDistance
from attention_jax.scores.dot import Dot, General, ScaledDot
from attention_jax.scores.function import FunctionScore
from attention_jax.scores.products import tall_product
from attention_jax.scores.projected import ProjectedScore
from attention_jax.scores.registry import DEFAULT_SCORE, SCORES, ScoreLike, get_score
from attention_jax.scores.row_scaled import RowScaled
from attention_jax.scores.slopes import masked_pair, stand_in_tokens, stand_ins
from attention_jax.scores.soft_cap import SoftCap
from attention_jax.scores.wrapped import WrappedScore

__all__ = [
    "DEFAULT_SCORE",
    "SCORES",
    "Additive",
    "Concat",
    "Cosine",
    "Dot",
    "FunctionScore",
    "General",
    "NegativeSquaredDistance",
    "PairCost",
    "Params",
    "ProjectedScore",
    "RowScaled",
    "ScaledDot",
    "Score",
    "ScoreLike",
    "SoftCap",
    "WrappedScore",
    "get_score",
    "masked_pair",
    "stand_in_tokens",
    "stand_ins",
    "tall_product",
]
