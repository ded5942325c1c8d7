"""Keys and values that are attended to again and again: projected once, and kept.

A score's `project` costs O(S) products; a decoder that attends to the same keys in every step would
pay it in every step. What is kept are the features that `pair` reads, `Memory`; whoever takes a key
takes a `Memory` in its place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.contract import Inputs
from attention_jax.scores import Params, ProjectedScore, Score

Array = jax.Array


class Memory(NamedTuple):
    """What is kept of a source; leading axes as the key's and value's own."""

    keys: Array  # [*B, S, F] projected; [*B, S, Dk] as they came, if a score's features are a tree
    values: Array  # [*B, S, Dv]


export.register_namedtuple_serialization(Memory, serialized_name="attention_jax.Memory")


def remember(
    score: Score, params: Params, key: Array, value: Array | None, *, query_dim: int
) -> Memory:
    """Projects keys once.

    Args:
        score: the score.
        params: its parameters; leading axes that the keys lack are given to the features.
        key: float [*B, S, Dk].
        value: float [*B, S, Dv]; None for `key`.
        query_dim: Dq, of the queries to come.

    Returns:
        a `Memory`, the projected keys in the compute dtype.

    >>> from attention_jax.scores import Additive
    >>> score = Additive(hidden_dim=4)
    >>> params = score.init(jax.random.key(0), 2, 3)
    >>> remember(score, params, jnp.ones((7, 3)), None, query_dim=2).keys.shape
    (7, 4)
    """
    value = key if value is None else value
    if not _has_single_features(score, params, query_dim, key.shape[-1]):
        return Memory(key, value)
    query = jnp.zeros((1, query_dim), key.dtype)
    return Memory(_project(score, params, query, key)[1], value)


def recall(
    score: Score, params: Params, query: Array, memory: Memory, *, key_dim: int
) -> tuple[Score, Array]:
    """A score and queries that pair with a memory's keys as `score` and `query` would with `key`.

    Args:
        score: the score that `remember` was given.
        params: its parameters.
        query: float [*B, T, Dq].
        memory: what was kept.
        key_dim: Dk, of the keys before they were projected.

    Returns:
        (score, queries): for `attention` and its like, with `memory.keys` as the key.
    """
    query_dim = query.shape[-1]
    if not _has_single_features(score, params, query_dim, key_dim):
        return score, query
    key = jnp.zeros((1, key_dim), query.dtype)
    # Rounded no further than the features of an ordinary call.
    return ProjectedScore(score, query_dim, key_dim), _project(score, params, query, key)[0]


def resolve(
    score: Score,
    params: Params,
    query: Array,
    key: Array | Memory,
    value: Array | None,
    key_dim: int,
) -> tuple[Score, Array, Array, Array]:
    """(score, query, key, value) as `attention` takes them, where `key` may be a `Memory`."""
    if isinstance(key, Memory):
        if value is not None:
            raise ValueError("value must be None where key is a Memory, which holds the values")
        score, query = recall(score, params, query, key, key_dim=key_dim)
        return score, query, key.keys, key.values
    return score, query, key, key if value is None else value


def _project(score: Score, params: Params, query: Array, key: Array) -> Any:
    """Both features, with the batch axes of either side and of the parameters, broadcast."""
    shapes = score.param_shapes(params, query.shape[-1], key.shape[-1])
    leads = jax.tree.map(
        lambda leaf, core: jnp.shape(leaf)[: jnp.ndim(leaf) - len(core.shape)], params, shapes
    )
    own = jax.tree.leaves(leads, is_leaf=lambda lead: isinstance(lead, tuple))
    batch = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2], *own)
    query = jnp.broadcast_to(query, (*batch, *query.shape[-2:]))

    def project(inputs: Inputs) -> Any:
        point = cast_floats((inputs.params, inputs.query, inputs.key), inputs.compute_dtype)
        return score.project(*point)

    return vmap_over_batch(score, project, Inputs(query, key, key, params, None, None, None))


def _has_single_features(score: Score, params: Params, query_dim: int, key_dim: int) -> bool:
    """Whether `project` makes one array [t, F] of each side."""
    params = score.param_shapes(params, query_dim, key_dim)
    tokens = (jax.ShapeDtypeStruct((1, dim), jnp.float32) for dim in (query_dim, key_dim))
    features: Any = jax.eval_shape(score.project, params, *tokens)
    shapes = [getattr(feature, "shape", ()) for feature in features]
    return all(len(shape) == 2 and shape[:1] == (1,) for shape in shapes)
