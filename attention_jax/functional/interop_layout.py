"""Attention for the layout of `jax.nn` and Flax, with positions before heads; used by `interop`.

Queries are [*B, T, N, Dq] and keys [*B, S, K, Dk], N = K G; `attention` takes [*B, K, G, T, Dq]
and [*B, K, 1, S, Dk].
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import any_array
from attention_jax.core.backend import current_backend
from attention_jax.functional.attention import attention_weights, damped_attention
from attention_jax.functional.capture_point import heads_as_one_axis
from attention_jax.functional.checks import checked_inputs
from attention_jax.functional.heads import group_heads, ungroup_heads
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.kernels.choice import choose
from attention_jax.pairwise.biases import as_bias
from attention_jax.pairwise.masks import Mask, as_mask
from attention_jax.pairwise.position_functions import PositionFunction, broadcasts, pad_rank
from attention_jax.scores import Score

Array = jax.Array


def checked_layout(score: Score, query, key, value, params, bias, *masks) -> Inputs:
    """The arguments as `Inputs`, with positions before heads; ValueError unless they match."""
    _check_layout(query, key, value)
    for name, array in (("bias", bias), *(("mask", mask) for mask in masks)):
        _check_mask_or_bias(name, array, query, key)
    # An array with fewer axes lacks the leading ones, as in `jax.nn` and Flax.
    mask_list = [
        as_mask(mask if isinstance(mask, Mask) else pad_rank(any_array("mask", mask), query.ndim))
        for mask in masks
        if mask is not None
    ]
    mask = functools.reduce(operator.and_, mask_list) if mask_list else None

    def repeat_heads(x: Array) -> jax.ShapeDtypeStruct:
        shape = (*x.shape[:-3], query.shape[-2], x.shape[-3], x.shape[-1])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    # `checked_inputs` checks the rest, for shapes with one key head per query head.
    def check(query: Array, key: Array, value: Array) -> Inputs:
        return checked_inputs(score, query, key, value, params, mask, bias).inputs

    jax.eval_shape(check, *map(repeat_heads, (query, key, value)))
    params = jax.tree.map(jnp.asarray, score.own_params if params is None else params)
    if bias is not None:
        bias = as_bias(bias)
    return Inputs(query, key, value, params, mask, bias, None)


_SWAPPED = "; if the heads come before the positions in query, key and value, swap these two axes"


def _check_layout(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError unless batch axes, lengths and numbers of heads match."""
    if query.ndim < 3 or key.ndim != query.ndim or key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            "query and key must be [*B, T, N, Dq] and [*B, S, K, Dk]; got"
            f" {list(query.shape)} and {list(key.shape)}"
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must be [*B, S, K, Dv] to match key {list(key.shape)}; got {list(value.shape)}"
        )
    if query.shape[-2] % max(key.shape[-2], 1) != 0:
        raise ValueError(
            f"query must be [*B, T, N, Dq], N a multiple of the {key.shape[-2]} heads of key"
            f" {list(key.shape)}; got {list(query.shape)}{_SWAPPED}"
        )


def _check_mask_or_bias(name: str, mask_or_bias: Any, query: Array, key: Array) -> None:
    """Raises ValueError unless an array broadcasts to [*B, N, T, S].

    An array that would fit if positions and heads were swapped suggests that they are.
    """
    if mask_or_bias is None or isinstance(mask_or_bias, PositionFunction):
        return
    (*batch, length, num_heads, _), (source_length, num_key_heads) = query.shape, key.shape[-3:-1]
    full, shape = (*batch, num_heads, length, source_length), any_array(name, mask_or_bias).shape
    if not broadcasts(shape, full):
        hint = _SWAPPED if broadcasts(shape, (*batch, length, num_heads, num_key_heads)) else ""
        raise ValueError(
            f"{name} must broadcast to {list(full)} (*B, N, T, S); got {list(shape)}{hint}"
        )


def attend_by_group(
    score: Score,
    inputs: Inputs,
    implementation: str | None,
    block_sizes: BlockSizes | None,
    *,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = False,
    return_statistics: bool = False,
) -> Any:
    """Output [*B, N, T, Dv]; or (output, statistics [*B, N, T])."""
    inputs = _by_group(score, inputs)
    # Chosen for all heads: with `broadcast_dropout`, `attention` gets one head at a time.
    options = Options(score, BlockSizes(), dropout_rate, return_statistics)
    implementation, options = choose(
        implementation, block_sizes, options, inputs, current_backend()
    )
    arguments: Any = {
        "score": score,
        "dropout_rate": dropout_rate,
        "implementation": implementation,
        "block_sizes": options.block_sizes,
        "return_statistics": return_statistics,
    }
    if not (broadcast_dropout and dropout_rate > 0):
        with heads_as_one_axis(inputs.query.ndim - 4):
            return _heads_together(damped_attention(**inputs._asdict(), **arguments), inputs)

    def attend_head(head: Inputs, dropout_rng: Array) -> Any:
        return damped_attention(**head._replace(dropout_rng=dropout_rng)._asdict(), **arguments)

    # `attention` would split the PRNG key over the heads; here they share it.
    assert inputs.dropout_rng is not None  # checked by the caller
    shared_rng = (inputs.dropout_rng, 0)
    heads = vmap_over_batch(
        score, attend_head, inputs._replace(dropout_rng=None), shared_rng, by_query=True
    )
    return _heads_together(heads, inputs)


def weights_by_group(score: Score, inputs: Inputs) -> Array:
    """Weights [*B, N, T, S]."""
    inputs = _by_group(score, inputs)
    weights = attention_weights(
        inputs.query,
        inputs.key,
        score=score,
        params=inputs.params,
        mask=inputs.mask,
        bias=inputs.bias,
    )
    return _heads_together(weights, inputs)


def _by_group(score: Score, inputs: Inputs) -> Inputs:
    """`Inputs` with batch axes [*B, K, G]; keys and values have size 1 on the axis G."""
    query, key, value = (jnp.swapaxes(array, -2, -3) for array in inputs[:3])
    grouped = functools.partial(group_heads, num_key_heads=key.shape[-3])
    param_shapes = score.param_shapes(inputs.params, query.shape[-1], key.shape[-1])
    param_ndims = jax.tree.map(lambda leaf: len(leaf.shape), param_shapes)
    params = jax.tree.map(grouped, inputs.params, param_ndims)
    mask, bias = inputs.mask, inputs.bias
    mask = None if mask is None else jax.tree.map(grouped, mask, mask.core_ndims())
    bias = None if bias is None else jax.tree.map(grouped, bias, bias.core_ndims())
    key, value = key[..., None, :, :], value[..., None, :, :]
    return Inputs(grouped(query, 2), key, value, params, mask, bias, inputs.dropout_rng)


def _heads_together(results: Any, inputs: Inputs) -> Any:
    """[*B, K, G, ...] -> [*B, N, ...]."""
    return ungroup_heads(results, inputs.query.ndim - 4)
