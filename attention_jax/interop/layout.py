"""The layout of `jax.nn` and Flax, positions before heads: from it to `attention`, and back."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import any_array, pad_rank
from attention_jax.functional.attention import attention_of
from attention_jax.functional.checks import (
    check_axes,
    check_equal_dims,
    checked_call,
    checked_params,
    compute_dtype,
)
from attention_jax.functional.heads import (
    group_heads,
    group_positions,
    heads_as_one_axis,
    ungroup_heads,
)
from attention_jax.parts import known_positions, known_score
from attention_jax.positions.contract import Bias, Mask, as_bias, as_mask
from attention_jax.scores import Params, Score
from attention_jax.tiles import Inputs, Options
from attention_jax.tiles.options import core_ndims_of_params

Array = jax.Array


def checked_heads(
    score: Score,
    params: Params,
    tokens: tuple[Array, Array, Array],
    masks: Iterable[Any],
    bias: Any,
    *,
    ndim: int,
) -> tuple[Score, Inputs]:
    """The score and the arrays of a call, positions before heads, with what a user wrote traced.

    Args:
        score: the score.
        params: leaves may have leading axes that broadcast to [*B, N].
        tokens: query [*B, T, N, Dq], key [*B, S, K, Dk], value [*B, S, K, Dv].
        masks: `Mask`s or arrays that broadcast to [*B, N, T, S]; None where there is none.
        bias: a `Bias` or an array, likewise; or None.
        ndim: the number of axes [*B, N, T, S], of which arrays of pairs may lack the first.

    Raises:
        ValueError: batch axes, lengths or numbers of heads do not match, or the parameters.
    """
    masks = [as_mask(_padded("mask", mask, ndim)) for mask in masks if mask is not None]
    bias = None if bias is None else as_bias(_padded("bias", bias, ndim))
    query, key, value = tokens
    check_axes("query", query, ("T", "N", "Dq"), None)
    *batch, length, num_heads, query_dim = query.shape
    check_axes("key", key, (*batch, "S", "K", "Dk"), (), f" to match query {list(query.shape)}")
    *_, source_length, num_key_heads, key_dim = key.shape
    check_axes("value", value, (*key.shape[:-1], "Dv"), (), f" to match key {list(key.shape)}")
    if num_heads % max(num_key_heads, 1) != 0:
        raise ValueError(
            f"query must be [*B, T, N, Dq], N a multiple of the {num_key_heads} heads of key"
            f" {list(key.shape)}; got {list(query.shape)}"
        )
    check_equal_dims(score, query, key)
    dtype, lengths = compute_dtype(tokens, params, bias), (length, source_length)
    score = known_score(score, params, query_dim, key_dim, dtype, lengths)
    params = checked_params(score, params, query_dim, key_dim, (*batch, num_heads))
    mask, bias = (
        None if function is None else known_positions(function, lengths, dtype)
        for function in (joined_masks(masks), jax.tree.map(jnp.asarray, bias))
    )
    return score, Inputs(*tokens, params, mask, bias, dropout_rng=None)


def grouped(score: Score, inputs: Inputs, **options: Any) -> tuple[Options, Inputs]:
    """The call of `attention` with batch axes [*B, K, G]; ValueError unless the arguments match."""
    *batch, length, num_heads, query_dim = inputs.query.shape
    source_length, num_key_heads, key_dim = inputs.key.shape[-3:]
    shape = (*batch, num_heads, length, source_length)
    param_ndims = core_ndims_of_params(score, inputs.params, query_dim, key_dim)
    query, key, value = (jnp.swapaxes(array, -2, -3) for array in inputs[:3])
    return checked_call(
        group_heads(query, 2, num_key_heads),
        key[..., None, :, :],
        value[..., None, :, :],
        score=score,
        params=group_heads(inputs.params, param_ndims, num_key_heads),
        mask=group_positions(inputs.mask, shape, num_key_heads),
        bias=group_positions(inputs.bias, shape, num_key_heads),
        **options,
    )


def attention_by_head(options: Options, inputs: Inputs, implementation: str | None) -> Any:
    """The output [*B, T, N, Dv]; or (output, statistics [*B, T, N]) if they are requested."""
    batch_ndim = inputs.query.ndim - 4
    with heads_as_one_axis(batch_ndim):
        results = ungroup_heads(attention_of(options, inputs, implementation), batch_ndim)
    return jax.tree.map(lambda array: array.swapaxes(batch_ndim, batch_ndim + 1), results)


def joined_masks(masks: Iterable[Mask | None]) -> Mask | None:
    """The pairs that every mask allows; None if there is no mask."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, present) if present else None


def _padded(name: str, pairs: Any, ndim: int) -> Any:
    """An array with fewer than `ndim` axes lacks the leading ones, as in `jax.nn` and Flax."""
    return pairs if isinstance(pairs, Mask | Bias) else pad_rank(any_array(name, pairs), ndim)
