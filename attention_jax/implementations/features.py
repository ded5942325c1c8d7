"""The features of tokens as `pair` reads them: projected, and rounded if the tokens are 16 bits."""

from __future__ import annotations

from typing import Any

import jax

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations.contract import Inputs
from attention_jax.scores import Score
from attention_jax.scores.projected_keys import key_features
from attention_jax.scores.stand_ins import needs_stand_ins, stand_in_key, stand_in_query


def projected(score: Score, inputs: Inputs, params: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The features of `query` [T, Dq] and `key` [S, Dk], all given in the compute dtype.

    The score projects them in float32. If the tokens of `inputs` are 16 bits wide, it rounds the
    features to their dtype, in which a tensor core multiplies them.
    """
    q_features, k_features = score.project_query(params, query), key_features(score, params, key)
    dtype = inputs.token_dtype
    if dtype.itemsize > 2:
        return q_features, k_features
    return score.round(q_features, "query", dtype), score.round(k_features, "key", dtype)


def stand_in_features(score: Score, inputs: Inputs) -> tuple[Any, Any] | None:
    """The features [Fq], [Fk] that replace those of masked pairs; None if the score needs none."""
    params, query, key = inputs.params, inputs.query, inputs.key
    if not needs_stand_ins(score, params, query.shape[-1], key.shape[-1]):
        return None
    params, query, key = cast_floats((params, query, key), inputs.compute_dtype)
    features = projected(
        score, inputs, params, stand_in_query(query), jax.tree.map(stand_in_key, key)
    )
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), features)
