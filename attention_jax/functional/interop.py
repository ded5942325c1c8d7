"""Any score inside models written for `jax.nn` or Flax: two functions with their interfaces.

Both take queries [*B, T, N, Dq] and keys [*B, S, K, Dk], positions before heads. N = K G, and query
head n reads key head n // G (grouped-query attention; multi-query for K = 1). Keys and values are
never repeated for the G query heads that share them.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jax.typing import ArrayLike

from attention_jax.core.arrays import accumulator_dtype, any_array, float_array
from attention_jax.core.checks import checked_rate, checked_rng
from attention_jax.functional.checks import checked_implementation
from attention_jax.functional.interop_layout import (
    attend_by_group,
    checked_layout,
    weights_by_group,
)
from attention_jax.implementations import BlockSizes
from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.known import known_positions
from attention_jax.pairwise.masks import Mask, causal_mask, local_mask, padding_mask
from attention_jax.pairwise.position_functions import PositionFunction, check_decorated, pad_rank
from attention_jax.scores import Params, Score, ScoreLike, get_score, known_score

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
        scale: for score "scaled" only, in place of 1 / sqrt(Dk): a float, or a scalar array, which
            is differentiable.
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
    score = get_score(score)
    if scale is not None:
        score, params = score.with_scale(params, scale)
    implementation = _checked_implementation(implementation)
    query, key, value = (
        _checked_axes(name, shape, float_array(name, array))
        for name, shape, array in (
            ("query", "[B, T, N, Dq] or [T, N, Dq]", query),
            ("key", "[B, S, K, Dk] or [S, K, Dk]", key),
            ("value", "[B, S, K, Dv] or [S, K, Dv]", value),
        )
    )
    static_masks = (causal_mask() if is_causal else None, _window_mask(local_window_size))
    pairs = (_pairs_as_arrays("mask", mask), _pairs_as_arrays("bias", bias))
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    lengths = {name: any_array(name, x) for name, x in lengths.items() if x is not None}
    params = _params_as_arrays(score.own_params if params is None else params)
    dtype = accumulator_dtype(query, key, value, *jax.tree.leaves(params))
    score = known_score(score, params, query.shape[-1], key.shape[-1], dtype.type)
    return _dot_product_attention(
        score,
        implementation,
        bool(return_residual),
        query,
        key,
        value,
        *pairs,
        params,
        static_masks,
        lengths,
    )


# One compiled program, checks included: op by op, the layout costs ten times the attention.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _dot_product_attention(
    score: Score,
    implementation: str | None,
    return_residual: bool,
    query: Array,
    key: Array,
    value: Array,
    mask: Any,
    bias: Any,
    params: Params,
    static_masks: tuple[Mask | None, ...],
    lengths: dict[str, Array],
) -> Any:
    unbatched = query.ndim == 3
    query, key, value = (pad_rank(array, 4) for array in (query, key, value))
    masks = (mask, *static_masks, _lengths_mask(key, lengths))
    inputs = checked_layout(score, query, key, value, params, bias, *masks)
    results = attend_by_group(
        score, inputs, implementation, None, return_statistics=return_residual
    )
    if return_residual:
        results = (results[0], results[1].logsumexp.astype(key.dtype))
    examples = 0 if unbatched else slice(None)
    return jax.tree.map(lambda array: array.swapaxes(1, 2)[examples], results)


def _pairs_as_arrays(name: str, pairs: Any) -> Any:
    """A mask or bias that `jax.jit` accepts: None, a `Mask` or `Bias`, or an array."""
    if pairs is None:
        return None
    if isinstance(pairs, PositionFunction):
        check_decorated(pairs)
        return known_positions(pairs)
    return any_array(name, pairs)


def _params_as_arrays(params: Params) -> Params:
    """The parameters with JAX arrays as leaves."""

    def as_array(path: Any, leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else any_array(f"params{keystr(path)}", leaf)

    keystr = jax.tree_util.keystr
    return jax.tree_util.tree_map_with_path(as_array, params)


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
    Linen), which stores the weights before dropout, and so materialises them. `broadcast_dropout`
    drops the same pairs in every example and head, as in Flax, but not the pairs that Flax drops.
    `precision` has no effect: `jax.default_matmul_precision` sets that of float32 products.

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
    """
    return _FlaxAttention(
        get_score(score), params, _checked_implementation(implementation), block_sizes
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
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        params = jax.tree.map(lambda leaf: leaf[...], self.params, is_leaf=_is_variable)
        if mask is not None and not isinstance(mask, Mask):
            mask = jnp.asarray(mask).astype(bool)  # Flax's own mask makers give float32
        causal = causal_mask() if is_causal else None
        inputs = checked_layout(self.score, query, key, value, params, bias, mask, causal)
        if module is not None:
            # The name of the collection in Linen; in NNX it stands for `nnx.Intermediate`.
            module.sow("intermediates", "attention_weights", weights_by_group(self.score, inputs))
        rate = 0.0 if deterministic else checked_rate(dropout_rate)
        if rate > 0:
            inputs = inputs._replace(dropout_rng=checked_rng(dropout_rng))
        options: Any = {"dropout_rate": rate, "broadcast_dropout": bool(broadcast_dropout)}
        output = attend_by_group(
            self.score, inputs, self.implementation, self.block_sizes, **options
        )
        return jnp.swapaxes(output, -2, -3)


# --- from the arguments of `jax.nn.dot_product_attention` to those of `attention` ---


def _checked_implementation(implementation: Any) -> str | None:
    """`checked_implementation`, with a hint for the name that only `jax.nn` accepts."""
    if implementation == "xla":
        raise ValueError(
            f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; got jax.nn's"
            f" {implementation!r}: leave it out, or call jax.nn.dot_product_attention"
        )
    return checked_implementation(implementation)


def _checked_axes(name: str, shape: str, array: Array) -> Array:
    """The array; ValueError unless it has three or four axes."""
    if array.ndim not in (3, 4):
        raise ValueError(f"{name} must be {shape}; got {list(array.shape)}")
    return array


def _window_mask(size: int | tuple[int, int] | None) -> Mask | None:
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


def _lengths_mask(key: Array, lengths: dict[str, Array]) -> Mask | None:
    """The padding mask of `query_seq_lengths` and `key_value_seq_lengths`."""
    batch_size, source_length = key.shape[:2]
    for name, array in lengths.items():
        if array.shape != (batch_size,) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers [{batch_size}]; got {array.dtype} {list(array.shape)}"
            )
    if not lengths:
        return None
    keys = lengths.get("key_value_seq_lengths", jnp.full(batch_size, source_length))
    queries = lengths.get("query_seq_lengths")
    # [B, 1]: the second axis broadcasts to the heads.
    return padding_mask(keys[:, None], None if queries is None else queries[:, None])
