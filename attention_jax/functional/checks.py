"""Checks of the arguments of attention functions, made before anything compiles.

Each raises a ValueError that names the argument, what was expected, and what was given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, any_array, float_array
from attention_jax.core.checks import (
    checked_rate,
    checked_rng,
)
from attention_jax.implementations import BlockSizes, Inputs
from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.normalizers import Normalizer, Softmax, known_normalizer
from attention_jax.pairwise.biases import as_bias
from attention_jax.pairwise.known import known_positions
from attention_jax.pairwise.masks import as_mask
from attention_jax.pairwise.position_functions import broadcasts
from attention_jax.scores import Params, ProjectedKeys, Score, key_feature_shapes, known_score

Array = jax.Array

_SOFTMAX = Softmax()


class Call(NamedTuple):
    """What a call of an attention function is about."""

    score: Score  # `Known` if a user wrote it
    normalizer: Normalizer  # the same
    inputs: Inputs


def checked_inputs(
    score: Score,
    query,
    key,
    value,
    params,
    mask,
    bias,
    normalizer: Normalizer = _SOFTMAX,
    normalizer_params: Any = None,
) -> Call:
    """The arguments of a call, with JAX arrays; ValueError unless their shapes and dtypes match.

    Parts that a user wrote are traced here, and nowhere else: see `core.programs`.
    """
    query = float_array("query", query)
    key = _checked_keys(key)
    value = float_array("value", value)
    for name, array, shape in (
        ("query", query, "[*B, T, Dq]"),
        ("key", key, "[*B, S, Dk]"),
        ("value", value, "[*B, S, Dv]"),
    ):
        if array.ndim < 2:
            raise ValueError(f"{name} must be {shape}; got {list(array.shape)}")
    for name, array in (("query", query), ("key", key)):
        if array.shape[-1] == 0:
            raise ValueError(f"{name} must have at least one feature; got {list(array.shape)}")
    *batch_shape, target_length, query_dim = query.shape
    source_length, key_dim = key.shape[-2:]
    for name, array in (("key", key), ("value", value)):
        if not broadcasts(array.shape[:-2], tuple(batch_shape)):
            raise ValueError(
                f"{name} must have batch axes that broadcast to {batch_shape}, those of query"
                f" {list(query.shape)}; got {list(array.shape)}"
            )
    if value.shape[-2] != source_length:
        raise ValueError(
            f"value must be [..., {source_length}, Dv] to match key {list(key.shape)};"
            f" got {list(value.shape)}"
        )
    if score.needs_equal_dims and key_dim != query_dim:
        raise ValueError(
            f"key must be [..., S, {query_dim}] to match score {score} with query"
            f" [..., T, {query_dim}]; got {list(key.shape)}"
        )
    batch = tuple(batch_shape)
    floats = (query, key, value, params, bias, normalizer_params)
    dtype = accumulator_dtype(*(leaf for leaf in jax.tree.leaves(floats) if hasattr(leaf, "dtype")))
    params = score.own_params if params is None else params
    score = known_score(score, params, query_dim, key_dim, dtype.type)
    normalizer = known_normalizer(normalizer, dtype.type)
    params = checked_params(score, params, query_dim, key_dim, batch)
    if isinstance(key, ProjectedKeys):
        _check_features(score, params, key, query_dim)
    if mask is not None:
        mask = as_mask(mask)
        mask.check(batch, target_length, source_length)
        mask = known_positions(mask)
    if bias is not None:
        # A user-defined bias may hold Python numbers.
        bias = jax.tree.map(jnp.asarray, as_bias(bias))
        bias.check(batch, target_length, source_length)
        bias = known_positions(bias)
    normalizer_params = checked_normalizer_params(normalizer, normalizer_params, batch)
    inputs = Inputs(query, key, value, params, mask, bias, None, normalizer_params)
    return Call(score, normalizer, inputs)


def _checked_keys(key: Any) -> Array | ProjectedKeys:
    """The keys as a JAX array, or projected keys with JAX arrays as features."""
    if not isinstance(key, ProjectedKeys):
        return float_array("key", key)
    return jax.tree.map(lambda leaf: any_array("key.features", leaf), key)


def _check_features(score: Score, params: Params, key: ProjectedKeys, query_dim: int) -> None:
    """Raises ValueError unless the features have the shapes that `project_key` makes."""
    length = key.shape[-2]
    features = key_feature_shapes(score, params, query_dim, key.key_dim, length)
    expected = jax.tree.map(lambda leaf: list(leaf.shape), features)
    got = key.map(lambda leaf, ndim: list(leaf.shape[leaf.ndim - ndim :])).features
    if got != expected:
        raise ValueError(
            f"key must hold the features that score {score} makes of keys {[length, key.key_dim]},"
            f" {expected}; got {got}"
        )


def checked_params(
    score: Score,
    params: Params,
    query_dim: int,
    key_dim: int,
    batch_shape: tuple[int, ...] | None,
) -> Params:
    """The score's parameters as JAX arrays; ValueError unless they match `Score.param_shapes`.

    With `batch_shape=None` they may have any batch axes.
    """
    params = score.own_params if params is None else params
    expected = score.param_shapes(params, query_dim, key_dim)
    owner = f"score {score} with query [..., T, {query_dim}] and key [..., S, {key_dim}]"
    remedy = f"params=score.init(rng, {query_dim}, {key_dim}), where score = {score}"
    return _checked_tree("params", params, expected, owner, remedy, batch_shape)


def checked_normalizer_params(
    normalizer: Normalizer, params: Params, batch_shape: tuple[int, ...] | None
) -> Params:
    """The normaliser's parameters as JAX arrays; ValueError unless they match its `init`.

    With `batch_shape=None` they may have any batch axes.
    """
    params = {} if params is None else params
    expected = normalizer.param_shapes()
    owner = f"normalizer {normalizer}"
    remedy = f"normalizer_params=normalizer.init(rng), where normalizer = {normalizer}"
    return _checked_tree("normalizer_params", params, expected, owner, remedy, batch_shape)


def _checked_tree(
    argument: str,
    params: Params,
    expected: Any,
    owner: str,
    remedy: str,
    batch_shape: tuple[int, ...] | None,
) -> Params:
    """Parameters as JAX arrays; ValueError unless each has its expected shape after batch axes.

    Args:
        argument: the name of the argument.
        params: a pytree.
        expected: the same pytree with `jax.ShapeDtypeStruct`s.
        owner: what the parameters belong to, in words.
        remedy: how to make right parameters, in code.
        batch_shape: what the batch axes must broadcast to; None for any batch axes.
    """
    if jax.tree.structure(params) != jax.tree.structure(expected):  # type: ignore[operator]
        described = jax.tree.map(lambda leaf: list(leaf.shape), expected)
        got = jax.tree.map(lambda leaf: list(np.shape(leaf)), params)
        hint = f": give {remedy}" if expected else ""
        raise ValueError(f"{argument} must be {described} for {owner}; got {got or params!r}{hint}")

    def check(path, leaf, expected_leaf):
        name = f"{argument}{jax.tree_util.keystr(path)}"
        array = float_array(name, leaf)
        core = list(expected_leaf.shape)
        ndim = array.ndim - len(core)
        if list(array.shape[ndim:]) != core or ndim < 0:
            raise ValueError(f"{name} must be {core} for {owner}; got {list(array.shape)}")
        if batch_shape is not None and not broadcasts(array.shape, (*batch_shape, *core)):
            raise ValueError(
                f"{name} must broadcast to {[*batch_shape, *core]}; got {list(array.shape)}"
            )
        return array

    return jax.tree_util.tree_map_with_path(check, params, expected)


def check_statistics(normalizer: Normalizer, return_statistics: bool) -> None:
    """Raises ValueError if statistics are requested of weights that have no logsumexp."""
    if return_statistics and not normalizer.has_statistics:
        raise ValueError(
            f"return_statistics must be False with normalizer {normalizer}, which has no logsumexp;"
            " attention_weights returns the weights themselves"
        )


def checked_implementation(name: Any) -> str | None:
    """`name`; ValueError unless it is None or the name of an implementation."""
    if name is None or (isinstance(name, str) and name in IMPLEMENTATIONS):
        return name
    raise ValueError(
        f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; got {name!r}"
    )


def checked_dropout(rate: Any, rng: Any) -> tuple[float, Array | None]:
    """(rate, rng), the rng None at rate 0; ValueError without an rng at another rate."""
    rate = checked_rate(rate)
    if rate == 0:
        return rate, None
    if rng is None:
        raise ValueError(f"dropout_rng must be a PRNG key when dropout_rate is {rate}; got None")
    return rate, checked_rng(rng)


def check_block_sizes(block_sizes: Any) -> None:
    """Raises ValueError unless `block_sizes` is a `BlockSizes` or None."""
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise ValueError(f"block_sizes must be a BlockSizes or None; got {block_sizes!r}")
