"""Any score inside models written for `jax.nn` or Flax: two functions with their interfaces.

Both take queries [*B, T, N, Dq] and keys [*B, S, K, Dk], positions before heads. N = K G, and query
head n reads key head n // G (grouped-query attention; multi-query for K = 1). Keys and values are
never repeated for the G query heads that share them.
"""

from __future__ import annotations

import functools
import numbers
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jax.typing import ArrayLike

from attention_jax.core.arrays import accumulator_dtype, any_array, float_array, integer_array
from attention_jax.core.checks import checked_rng
from attention_jax.functional.attention import results_of_call, weights_of
from attention_jax.functional.capture_point import heads_as_one_axis
from attention_jax.functional.checks import (
    Call,
    check_axes,
    check_equal_dims,
    checked_call,
    checked_implementation,
    checked_params,
)
from attention_jax.functional.heads import group_heads, group_positions, ungroup_heads
from attention_jax.parts import known_positions, known_score
from attention_jax.positions.biases import Bias, as_bias
from attention_jax.positions.masks import Mask, as_mask, causal_mask, local_mask, padding_mask
from attention_jax.positions.position_functions import pad_rank
from attention_jax.scores import Dot, Params, ScaledDot, Score, ScoreLike, get_score
from attention_jax.tiles import BlockSizes
from attention_jax.tiles.options import core_ndims_of_params

Array = jax.Array

__all__ = ["dot_product_attention", "flax_attention_fn"]


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
    given = mask, causal_mask() if is_causal else None, _mask_of_window(local_window_size)
    masks = [_with_axes("mask", mask, 4) for mask in given if mask is not None]
    bias = None if bias is None else _with_axes("bias", bias, 4)
    # What a user wrote is traced here, outside of the program below.
    score, heads = _checked_heads(score, params, query, key, value, bias, masks)
    batch_size = query.shape[0] if query.ndim > 3 else 1
    names = "query_seq_lengths", "key_value_seq_lengths"
    lengths = {
        name: check_axes(name, integer_array(name, array), (batch_size,), ())
        for name, array in zip(names, (query_seq_lengths, key_value_seq_lengths), strict=True)
        if array is not None
    }
    return _dot_product_attention(score, implementation, bool(return_residual), heads, **lengths)


# One compiled program, checks included: op by op, the layout costs ten times the attention.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _dot_product_attention(
    score: Score,
    implementation: str | None,
    return_residual: bool,
    heads: _HeadArrays,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
) -> Any:
    unbatched = heads.query.ndim == 3
    if unbatched:
        heads = heads._replace(**{name: getattr(heads, name)[None] for name in heads._fields[:3]})
    masks = list(heads.masks)
    if key_value_seq_lengths is not None:  # [B, 1]: the second axis broadcasts to the heads
        masks.append(padding_mask(key_value_seq_lengths[:, None]))
    if query_seq_lengths is not None:
        every_key = jnp.full_like(query_seq_lengths, heads.key.shape[1])
        masks.append(padding_mask(every_key[:, None], query_seq_lengths[:, None]))
    heads = heads._replace(masks=masks)
    call = _grouped_call(score, heads, return_statistics=return_residual)
    results = _results_by_head(call, implementation)
    if return_residual:
        results = results[0], results[1].logsumexp.astype(heads.key.dtype)
    return jax.tree.map(lambda array: array[0], results) if unbatched else results


def flax_attention_fn(
    score: ScoreLike = "scaled",
    params: Params = None,
    *,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> nnx.Module:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention` with any score.

    The function is an `nnx.Module`, so its parameters are part of the model that contains it:
    `nnx.split`, optimisers and checkpoints include them. Two layers with the same `attention_fn`
    share its parameters. With "scaled" it equals `flax.nnx.dot_product_attention`, except for
    queries whose keys are all masked (see `dot_product_attention`).

    It supports all arguments that Flax passes: `mask` (any dtype, not 0 = may attend; or a `Mask`,
    so that `layer(x, mask=local_mask(8, 0))` stores no table), `is_causal`, `bias`, `dtype`, the
    caches of `decode`, grouped-query attention, dropout, and `sow_weights` (also of a layer of
    Linen), which stores the weights before dropout, and so materialises them. A mask with a single
    query and several keys is that of a step of a cache, where `is_causal` adds nothing to it.
    `broadcast_dropout` drops the same pairs in every example and head, as in Flax, but not the
    pairs that Flax drops. `precision` has no effect: `jax.default_matmul_precision` sets that of
    float32 products.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function; Dq and Dk are the
            layer's head_dim.
        params: the score's parameters; leaves may have leading axes that broadcast to [*B, N].
            Arrays become `nnx.Param`; an `nnx.Variable` is used as it is, so it may be shared.
        implementation, block_sizes: as in `attention_jax.attention`.

    Returns:
        an `nnx.Module`; when Flax calls it, it returns [*B, T, N, Dv].

    Raises:
        ValueError: unknown score or implementation; when called: as in `attention`.

    >>> score = get_score("additive")  # 4 heads of size 8, each with its own parameters:
    >>> params = jax.vmap(lambda rng: score.init(rng, 8, 8))(jax.random.split(jax.random.key(0), 4))
    >>> attend = flax_attention_fn(score, params)
    >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=attend, rngs=nnx.Rngs(1))
    >>> nnx.state(layer, nnx.Param)["attention_fn"]["params"]["v"].shape
    (4, 8)

    A layer of Linen does not train what its `attention_fn` holds: a module around it declares the
    parameters, and makes the function of them.

    >>> from flax import linen
    >>> class Layer(linen.Module):
    ...     @linen.compact
    ...     def __call__(self, x):
    ...         attend = flax_attention_fn(score, self.param("score", score.init, 8, 8))
    ...         return linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attend)(x)
    >>> Layer().init(jax.random.key(0), jnp.ones((2, 5, 32)))["params"]["score"]["v"].shape
    (8,)
    """
    return _FlaxAttention(
        get_score(score), params, checked_implementation(implementation), block_sizes
    )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


class _FlaxAttention(nnx.Module):
    """The `attention_fn` that `flax_attention_fn` returns."""

    def __init__(self, score, params, implementation, block_sizes):
        def as_variable(leaf):
            return leaf if _is_variable(leaf) else nnx.Param(jnp.asarray(leaf))

        params = score.own_params if params is None else params
        self.params = nnx.data(jax.tree.map(as_variable, params, is_leaf=_is_variable))
        self.score = score
        self.implementation = implementation
        self.block_sizes = block_sizes

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Mask | Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Any = flax_promote_dtype,
        is_causal: bool = False,
    ) -> Array:
        """Takes the arguments of `flax.nnx.dot_product_attention`, in the same order."""
        del precision
        tokens = {"query": query, "key": key, "value": value}
        arrays = tuple(any_array(name, array) for name, array in tokens.items())
        query, key, value = promote_dtype(arrays, dtype=dtype)
        params = jax.tree.map(lambda leaf: leaf[...], self.params, is_leaf=_is_variable)
        if mask is not None and not isinstance(mask, Mask):
            mask = jnp.asarray(mask).astype(bool)  # Flax's own mask makers give float32
        # In a step of a cache the mask that Flax made is causal, and the query is not the first.
        is_step = mask is not None and query.shape[-3] == 1 < key.shape[-3]
        given = mask, causal_mask() if is_causal and not is_step else None
        masks = [_with_axes("mask", mask, query.ndim) for mask in given if mask is not None]
        bias = None if bias is None else _with_axes("bias", bias, query.ndim)
        rate = 0.0 if deterministic else dropout_rate
        if broadcast_dropout and rate:
            # `attention` would split one key over the batch and the heads; here they share it.
            dropout_rng = jax.random.split(checked_rng(dropout_rng), (1,) * (query.ndim - 1))
        score, heads = _checked_heads(self.score, params, query, key, value, bias, masks)
        call = _grouped_call(
            score, heads, dropout_rate=rate, dropout_rng=dropout_rng, block_sizes=self.block_sizes
        )
        if module is not None:
            # The name of the collection in Linen; in NNX it stands for `nnx.Intermediate`.
            weights = ungroup_heads(weights_of(*call), query.ndim - 3)
            module.sow("intermediates", "attention_weights", weights)
        return _results_by_head(call, self.implementation)


# --- from the arguments of `jax.nn.dot_product_attention` to those of `attention`, and back ---


class _HeadArrays(NamedTuple):
    """The arrays of a call, positions before heads."""

    query: Array  # [*B, T, N, Dq]
    key: Array  # [*B, S, K, Dk]
    value: Array  # [*B, S, K, Dv]
    params: Params  # axes broadcast to [*B, N]
    bias: Bias | None  # likewise
    masks: list[Mask]  # likewise


def _checked_heads(
    score: Score,
    params: Params,
    query: Array,
    key: Array,
    value: Array,
    bias: Bias | None,
    masks: list[Mask],
) -> tuple[Score, _HeadArrays]:
    """The score and the arrays of a call, with what a user wrote traced.

    Raises:
        ValueError: batch axes, lengths or numbers of heads do not match, or the parameters.
    """
    if query.ndim < 3 or key.ndim != query.ndim or key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            "query and key must be [*B, T, N, Dq] and [*B, S, K, Dk]; got"
            f" {list(query.shape)} and {list(key.shape)}"
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must be [*B, S, K, Dv] to match key {list(key.shape)}; got {list(value.shape)}"
        )
    (*batch, _, num_heads, query_dim), (num_key_heads, key_dim) = query.shape, key.shape[-2:]
    if num_heads % max(num_key_heads, 1) != 0:
        raise ValueError(
            f"query must be [*B, T, N, Dq], N a multiple of the {num_key_heads} heads of key"
            f" {list(key.shape)}; got {list(query.shape)}"
        )
    check_equal_dims(score, query, key)
    arrays = (leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype"))
    dtype = accumulator_dtype(query, key, value, *arrays).type
    lengths = query.shape[-3], key.shape[-3]
    score = known_score(score, params, query_dim, key_dim, dtype, lengths)
    params = checked_params(score, params, query_dim, key_dim, (*batch, num_heads))
    known = functools.partial(known_positions, lengths=lengths, dtype=dtype)
    known_bias = None if bias is None else known(jax.tree.map(jnp.asarray, bias))
    return score, _HeadArrays(query, key, value, params, known_bias, [*map(known, masks)])


def _grouped_call(score: Score, heads: _HeadArrays, **options: Any) -> Call:
    """The call of `attention` with batch axes [*B, K, G]; ValueError unless the arguments match."""
    *batch, length, num_heads, query_dim = heads.query.shape
    source_length, num_key_heads, key_dim = heads.key.shape[-3:]
    shape = (*batch, num_heads, length, source_length)
    mask = functools.reduce(operator.and_, heads.masks) if heads.masks else None
    param_ndims = core_ndims_of_params(score, heads.params, query_dim, key_dim)
    query, key, value = (jnp.swapaxes(array, -2, -3) for array in heads[:3])
    return checked_call(
        group_heads(query, 2, num_key_heads),
        key[..., None, :, :],
        value[..., None, :, :],
        score=score,
        params=group_heads(heads.params, param_ndims, num_key_heads),
        mask=group_positions(mask, shape, num_key_heads),
        bias=group_positions(heads.bias, shape, num_key_heads),
        **options,
    )


def _results_by_head(call: Call, implementation: str | None) -> Any:
    """The output [*B, T, N, Dv]; or (output, statistics [*B, T, N]) if they are requested."""
    batch_ndim = call.inputs.query.ndim - 4
    with heads_as_one_axis(batch_ndim):
        results = ungroup_heads(results_of_call(call, implementation), batch_ndim)
    return jax.tree.map(lambda array: array.swapaxes(batch_ndim, batch_ndim + 1), results)


def _with_axes(name: str, pairs: Any, ndim: int) -> Any:
    """An array with fewer than `ndim` axes lacks the leading ones, as in `jax.nn` and Flax."""
    pairs = pairs if isinstance(pairs, Mask | Bias) else pad_rank(any_array(name, pairs), ndim)
    return as_mask(pairs) if name == "mask" else as_bias(pairs)


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
