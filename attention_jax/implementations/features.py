"""The features of tokens as `pair` reads them: projected, and rounded if the tokens are 16 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations.contract import Inputs
from attention_jax.implementations.tile_arrays import replace_and_pad
from attention_jax.scores import ProjectedKeys, Score
from attention_jax.scores.contract import Features, Side
from attention_jax.scores.origin import origin_of
from attention_jax.scores.stand_ins import needs_stand_ins, stand_in_key, stand_in_query

Array = jax.Array


class Operands(NamedTuple):
    """The tokens of one example as `pair` and the weighted sum read them, and the parameters."""

    queries: Any  # features [T, ...]
    keys: Any  # features [S, ...]
    values: Array  # [S, Dv]
    params: Any  # of the score, in the compute dtype


def projected(score: Score, inputs: Inputs, params: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The features of `query` [T, Dq] and `key` [S, Dk], all given in the compute dtype.

    The score projects them in float32. If the tokens of `inputs` are 16 bits wide, it rounds the
    features to their dtype, in which a tensor core multiplies them.
    """
    is_projected, dtype = isinstance(key, ProjectedKeys), inputs.token_dtype
    k_features = key.features if is_projected else score.project_key(params, key)
    return (
        rounded_features(score, score.project_query(params, query), "query", dtype),
        rounded_features(score, k_features, "key", dtype),
    )


def rounded_features(score: Score, features: Features, side: Side, dtype: jnp.dtype) -> Features:
    """The features as `pair` reads them, of tokens that are multiplied in a dtype."""
    return score.round(features, side, dtype) if dtype.itemsize == 2 else features


def projected_tokens(
    score: Score,
    inputs: Inputs,
    lengths: tuple[int, int],
    used: tuple[Array | None, Array | None],
    axis: str | None = None,
) -> Operands:
    """The tokens of one example, projected, without what the mask hides.

    Args:
        score: the score.
        inputs: the arrays of one example.
        lengths: (T, S), to which tokens are padded.
        used: which queries and which keys an allowed pair contains, bool, see `replace_and_pad`;
            None for all, if nothing is padded.
        axis: the mesh axis of the devices that hold the other tokens of the example, if any.
    """
    params, query, key, values = cast_floats(
        (inputs.params, inputs.query, inputs.key, inputs.value), inputs.compute_dtype
    )
    if score.translation_invariant and not isinstance(key, ProjectedKeys):
        used_keys = None if used[1] is None else used[1][: key.shape[0]]
        origin = origin_of(key, used_keys, axis, short=inputs.token_dtype == jnp.bfloat16)
        query, key = query - origin, key - origin
    # Tokens are padded before the projection, so that the score sees only plausible tokens.
    query = replace_and_pad(query, lengths[0], used[0], stand_in_query(query))
    key = jax.tree.map(
        lambda tokens: replace_and_pad(tokens, lengths[1], used[1], stand_in_key(tokens)), key
    )
    values = replace_and_pad(values, lengths[1], used[1], 0).astype(inputs.value_dtype)
    return Operands(*projected(score, inputs, params, query, key), values, params)


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
