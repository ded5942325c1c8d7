"""The features of tokens as `pair` reads them: projected, and rounded if the tokens are 16 bits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.scores import ProjectedKeys, Score
from attention_jax.scores.contract import Features, Side
from attention_jax.scores.origin import origin_of
from attention_jax.tiles.options import Inputs
from attention_jax.tiles.stand_ins import needs_stand_ins
from attention_jax.tiles.tile_arrays import replace_and_pad

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
    query = replace_and_pad(query, lengths[0], used[0], _stand_in(query, "query"))
    key = jax.tree.map(
        lambda leaf: replace_and_pad(leaf, lengths[1], used[1], _stand_in(leaf, "key")), key
    )
    values = replace_and_pad(values, lengths[1], used[1], 0).astype(inputs.value_dtype)
    return Operands(*projected(score, inputs, params, query, key), values, params)


def stand_in_features(score: Score, inputs: Inputs) -> tuple[Any, Any] | None:
    """The features [Fq], [Fk] that replace those of masked pairs; None if the score needs none."""
    params, query, key = inputs.params, inputs.query, inputs.key
    if not needs_stand_ins(score, params, query.shape[-1], key.shape[-1]):
        return None
    params, query, key = cast_floats((params, query, key), inputs.compute_dtype)
    query, key = _stand_in(query, "query"), jax.tree.map(lambda leaf: _stand_in(leaf, "key"), key)
    features = projected(score, inputs, params, query, key)
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), features)


def _stand_in(tokens: Array, side: Side) -> Array:
    """The token that replaces those that no allowed pair contains: [length, D] -> [1, D].

    The query (1, 2, 1, 2, ...) and the key (3, 1, 3, 1, ...) are not 0, not equal and not parallel:
    a norm, a distance and an angle are smooth there.
    """
    even, odd = (1, 2) if side == "query" else (3, 1)
    shape = (1, *tokens.shape[1:])
    numbers = jnp.where(jnp.arange(math.prod(shape)) % 2 == 0, even, odd)
    return numbers.reshape(shape).astype(tokens.dtype)
