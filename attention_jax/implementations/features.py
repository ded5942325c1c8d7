"""The features of tokens as `pair` reads them: projected, and rounded if the tokens are 16 bits."""

from __future__ import annotations

from typing import Any

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations.contract import Inputs
from attention_jax.scores import Score, key_features, stand_ins


def projected(score: Score, inputs: Inputs, params: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The features of `query` [T, Dq] and `key` [S, Dk], all given in the compute dtype.

    The score projects them in float32. If the tokens of `inputs` are 16 bits wide, it rounds the
    features to their dtype, in which a tensor core multiplies them.
    """
    q_features, k_features = score.project_query(params, query), key_features(score, params, key)
    return _rounded(score, inputs, q_features, k_features)


def stand_in_features(score: Score, inputs: Inputs) -> tuple[Any, Any] | None:
    """The features that replace those of masked pairs; None if the score needs none."""
    dtype = inputs.compute_dtype
    params, query, key = cast_floats((inputs.params, inputs.query, inputs.key), dtype)
    features = stand_ins(score, params, query, key)
    return None if features is None else _rounded(score, inputs, *features)


def _rounded(score: Score, inputs: Inputs, q_features: Any, k_features: Any) -> tuple[Any, Any]:
    dtype = inputs.token_dtype
    if dtype.itemsize > 2:
        return q_features, k_features
    return score.round_query(q_features, dtype), score.round_key(k_features, dtype)
