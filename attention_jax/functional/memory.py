"""`Memory`: the keys and values that a decoder attends to in every step, projected once.

Projecting S keys costs O(S) products. A decoder that attends to the same keys in every step would
pay them in every step. A `Memory` stores the features that the score's `pair` reads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention_jax.core.arrays import accumulator_dtype, cast_floats
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.core.serialization import exported
from attention_jax.functional.checks import checked_floats, checked_params
from attention_jax.scores import KeyLike, Params, ProjectedKeys, ScoreLike, get_score
from attention_jax.tiles.features import round_features
from attention_jax.tiles.options import core_ndims_of_params, map_over_batch, narrow_or

Array = jax.Array


@exported
class Memory(NamedTuple):
    """The projected keys and the values of a source; modules take it in place of key and value.

    `attention(query, memory.keys, memory.values, ...)` attends to it.
    """

    # The features of keys [*B, S, Dk]; the keys themselves if the score is translation invariant.
    keys: KeyLike
    values: Array  # [*B, S, Dv]


def remember(
    score: ScoreLike, params: Params, key: Array, value: Array | None = None, *, query_dim: int
) -> Memory:
    """Projects the keys and stores their features with the values.

    Args:
        score: as in `attention`.
        params: the score's parameters; leading axes that the keys lack become axes of the features.
        key: float [*B, S, Dk].
        value: float [*B, S, Dv]; None to use `key`.
        query_dim: Dq, the size of the queries.

    Returns:
        a `Memory`, its features in the compute dtype: float32, or float64 if any input is. Those of
        16-bit keys are rounded, as in a call of `attention` with queries of the same dtype. A score
        that is `translation_invariant` keeps the keys as they are.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> from attention_jax import Additive
    >>> score = Additive(hidden_dim=4)
    >>> params = score.init(jax.random.key(0), 2, 3)
    >>> remember(score, params, jnp.ones((7, 3)), query_dim=2).keys.features.shape
    (7, 4)
    """
    score = get_score(score)
    key = checked_floats("key", key, ("S", "Dk"), None)
    matching = f" to match key {list(key.shape)}"
    value = key if value is None else value
    value = checked_floats("value", value, (key.shape[-2], "Dv"), None, matching)
    params = checked_params(score, params, query_dim, key.shape[-1], batch_shape=None)
    if score.translation_invariant:
        return Memory(key, value)  # the keys that a mask leaves decide about the origin
    param_ndims = core_ndims_of_params(score, params, query_dim, key.shape[-1])
    leaves = zip(*map(jax.tree.leaves, (params, param_ndims)), strict=True)
    batch_axes = [leaf.shape[: leaf.ndim - ndim] for leaf, ndim in leaves]
    batch_shape = jnp.broadcast_shapes(key.shape[:-2], *batch_axes)
    # The compute dtype, as in a call without a `Memory`, not the dtype of the keys.
    dtype = accumulator_dtype(key, value, *jax.tree.leaves(params))

    def project(params: Params, key: Array) -> ProjectedKeys:
        features = score.project_key(*cast_floats((params, key), dtype))
        features = round_features(score, features, "key", narrow_or(dtype, {key.dtype}))
        core_ndims = tuple(leaf.ndim for leaf in jax.tree.leaves(features))
        return ProjectedKeys(features, key.shape[-1], core_ndims)

    def batched(params: Params, key: Array) -> ProjectedKeys:
        return map_over_batch(project, batch_shape, (params, key), (param_ndims, 2))

    new_axes = len(batch_shape) - (key.ndim - 2)
    spec = PartitionSpec(*[None] * new_axes, *explicit_spec(key)[:-1])
    return Memory(on_automatic_axes(batched, spec, params, key), value)


def key_and_value(key: Array | Memory, value: Array | None) -> tuple[KeyLike, Array]:
    """The arguments (key, value) of `attention`, where `key` may be a `Memory`."""
    if not isinstance(key, Memory):
        return key, key if value is None else value
    if value is not None:
        raise ValueError("value must be None where key is a Memory, which holds the values")
    return key.keys, key.values
