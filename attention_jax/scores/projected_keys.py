"""`ProjectedKeys`: keys that are projected once and attended to many times.

A decoder attends to the same keys in every step, and `project_key` costs O(S) products. So the
decoder projects its memory once and passes the features in place of the keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.serialization import exported
from attention_jax.scores.contract import Features, Params, Score

Array = jax.Array


@exported
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["features"],
    meta_fields=["key_dim", "core_ndims"],
)
@dataclasses.dataclass(frozen=True)
class ProjectedKeys:
    """The features of keys, from a score's `project_key`; attention functions take it as `key`.

    Attributes:
        features: an array [*B, S, Fk], or a pytree of arrays [*B, S, ...], from `project_key`.
        key_dim: Dk, the size of the keys before the projection.
        core_ndims: the number of axes without *B of each array in `features`.

    >>> from attention_jax import Additive, remember
    >>> score = Additive(hidden_dim=8)
    >>> params = score.init(jax.random.key(0), query_dim=2, key_dim=2)
    >>> keys, values = remember(score, params, jnp.ones((3, 2)), query_dim=2)
    >>> keys.features.shape, keys.shape
    ((3, 8), (3, 2))
    """

    features: Features
    key_dim: int
    core_ndims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*B, S, Dk] of the keys before the projection."""
        leaf = jax.tree.leaves(self.features)[0]
        return (*leaf.shape[: leaf.ndim - self.core_ndims[0] + 1], self.key_dim)

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return len(self.shape)

    def map(self, function: Callable[[Array, int], Any]) -> "ProjectedKeys":
        """Replaces each array by function(array, its number of axes without *B)."""
        leaves, structure = jax.tree.flatten(self)
        return jax.tree.unflatten(
            structure,
            [function(leaf, ndim) for leaf, ndim in zip(leaves, self.core_ndims, strict=True)],
        )


KeyLike = Array | ProjectedKeys  # the argument `key` of attention functions


def key_feature_shapes(
    score: Score, params: Params, query_dim: int, key_dim: int, length: int
) -> Features:
    """The `jax.ShapeDtypeStruct` of each array that `project_key` makes of keys [length, Dk].

    All are taken in float32, and `params` may have batch axes.
    """
    param_shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
        score.param_shapes(params, query_dim, key_dim),
    )
    keys = jax.ShapeDtypeStruct((length, key_dim), jnp.float32)
    return jax.eval_shape(score.project_key, param_shapes, keys)
