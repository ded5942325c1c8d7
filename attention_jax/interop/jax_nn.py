"""`jax.nn.dot_product_attention` with any score."""

import functools
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attention_jax.core.arrays import accumulator_dtype, float_array, integer_array
from attention_jax.functional.checks import check_axes, checked_implementation
from attention_jax.interop.layout import (
    attention_by_head,
    checked_heads,
    grouped,
    joined_masks,
)
from attention_jax.positions.contract import Bias, Mask
from attention_jax.positions.masks import causal_mask, local_mask, padding_mask
from attention_jax.scores import Dot, Params, ScaledDot, Score, ScoreLike, get_score
from attention_jax.tiles import Inputs

Array = jax.Array


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: Bias | ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    score: ScoreLike = "scaled",
    params: Params = None,
) -> Any:
    """`jax.nn.dot_product_attention` with any score: the same arguments, then `score`, `params`.

        output_in = sum_j softmax_j(score(query_in, key_jk) + bias_nij where mask_nij) value_jk

    with k = n // G. Unlike `jax.nn`:

    - A query without keys gets output 0 and residual -inf, and sends no gradient (`jax.nn`: the
      mean of the values and a large negative residual; NaN where a bias of -inf masks). Beyond
      `query_seq_lengths` the output is 0 in both.
    - NaN in padding reaches no result (`jax.nn`: a NaN value reaches every output, a NaN key or
      query the gradients).
    - The residual is differentiable (`jax.nn`: its gradient is 0).
    - `value` may have another size than `key`, dtypes may differ, and float64 inputs are computed
      in float64 throughout (`jax.nn`: the softmax in float32). Strict dtype promotion is supported
      (`jax.nn`: for float32 only).
    - Causal, window and length masks are never stored as [T, S].
    - `mask` may be a `Mask` whose arrays have both leading axes [B, N] (lengths are [B, 1]) or
      neither, and `bias` a `Bias` whose arrays' leading axes broadcast to [B, N].
    - Inputs of fewer than 3 axes, integer biases and windows of negative size are errors.

    Args:
        query: float [B, T, N, Dq] or [T, N, Dq].
        key: float [B, S, K, Dk] or [S, K, Dk], N a multiple of K.
        value: float [B, S, K, Dv] or [S, K, Dv].
        bias: float broadcastable to [B, N, T, S], or a `Bias`; added to the logits.
        mask: bool broadcastable to [B, N, T, S], or a `Mask`; True = may attend.
        scale: for score "scaled" only, in place of 1 / sqrt(Dk): a float, or a scalar array.
        is_causal: query i attends to keys j <= i only.
        query_seq_lengths: int [B], the number of queries without padding.
        key_value_seq_lengths: int [B], the number of keys without padding.
        local_window_size: (left, right), or one int for both: query i attends to keys
            i - left <= j <= i + right (and j <= i if causal).
        implementation: as in `attention_jax.attention`; not "xla".
        return_residual: also return the logsumexp of each row of logits.
        score: a name in `SCORES`, "module:Name", a `Score`, or a function.
        params: the score's parameters; leaves may have leading axes that broadcast to [B, N], for
            instance [N, ...] for one set per query head.

    Returns:
        output [B, T, N, Dv] or [T, N, Dv] in the query's dtype; or (output, residual), the residual
        [B, T, N] or [T, N] in the key's dtype, as in `jax.nn`.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure, or is not supported.

    >>> query, key = jnp.ones((1, 5, 6, 8)), jnp.ones((1, 7, 2, 8))  # 6 query heads, 2 key heads
    >>> dot_product_attention(query, key, key, is_causal=True).shape
    (1, 5, 6, 8)

    Source: the layout and argument names of `jax.nn.dot_product_attention`, jax 0.10.2 to 0.12.
    """
    score, implementation = get_score(score), checked_implementation(implementation)
    tokens = {"query": query, "key": key, "value": value}
    query, key, value = (float_array(name, array) for name, array in tokens.items())
    if scale is not None:
        score, query = _with_scale(score, scale, query)
    masks = mask, causal_mask() if is_causal else None, _mask_of_window(local_window_size)
    # What a user wrote is traced here, outside of the program below.
    score, inputs = checked_heads(score, params, (query, key, value), masks, bias, ndim=4)
    batch_size = query.shape[0] if query.ndim > 3 else 1
    given = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    lengths = [
        None if each is None else check_axes(name, integer_array(name, each), (batch_size,), ())
        for name, each in given.items()
    ]
    return _dot_product_attention(score, implementation, bool(return_residual), inputs, *lengths)


# One compiled program, checks included: op by op, the layout costs ten times the attention.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _dot_product_attention(
    score: Score,
    implementation: str | None,
    return_residual: bool,
    inputs: Inputs,
    query_lengths: Array | None,
    key_lengths: Array | None,
) -> Any:
    unbatched, masks = inputs.query.ndim == 3, [inputs.mask]
    if unbatched:
        with_batch = {name: getattr(inputs, name)[None] for name in ("query", "key", "value")}
        inputs = inputs._replace(**with_batch)
    if key_lengths is not None:  # [B, 1]: the second axis broadcasts to the heads
        masks.append(padding_mask(key_lengths[:, None]))
    if query_lengths is not None:
        every_key = jnp.full_like(query_lengths, inputs.key.shape[1])
        masks.append(padding_mask(every_key[:, None], query_lengths[:, None]))
    inputs = inputs._replace(mask=joined_masks(masks))
    call = grouped(score, inputs, return_statistics=return_residual)
    results = attention_by_head(*call, implementation)
    if return_residual:
        results = results[0], results[1].logsumexp.astype(inputs.key.dtype)
    return jax.tree.map(lambda array: array[0], results) if unbatched else results


def _with_scale(score: Score, scale: Any, query: Array) -> tuple[Score, Array]:
    """The score "scaled" with another factor, and the query, into which an array goes."""
    if score != ScaledDot() or np.shape(scale) != ():
        raise ValueError(
            "scale must be None, or one number with score 'scaled' without a scale of its own; got"
            f" {scale!r} with score {score}"
        )
    if isinstance(scale, numbers.Real):
        return ScaledDot(float(scale)), query
    scale = float_array("scale", scale)
    dtype = accumulator_dtype(query, scale)
    return Dot(), (query.astype(dtype) * scale.astype(dtype)).astype(query.dtype)


def _mask_of_window(size: int | tuple[int, int] | None) -> Mask | None:
    """The mask of `local_window_size`."""
    if size is None:
        return None
    try:
        left, right = size if isinstance(size, (tuple, list)) else (size, size)
        return local_mask(operator.index(left), operator.index(right))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"local_window_size must be an int or (left, right), each at least 0; got {size!r}"
        ) from error
