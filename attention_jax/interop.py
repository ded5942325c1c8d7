"""Two doors shaped like other people's: any score inside a model written for `jax.nn` or Flax.

Both take queries [*B, T, N, Dq] and keys [*B, S, K, Dk], positions before heads. N = K G, and query
head n reads key head n // G (grouped-query attention; multi-query for K = 1). Keys and values are
never repeated for the G query heads that share them.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jax.typing import ArrayLike

from attention_jax.attention import attention, attention_weights
from attention_jax.biases import Bias, as_bias
from attention_jax.capture_point import heads_as_one_axis
from attention_jax.checks import checked_implementation, checked_inputs, checked_rate, checked_rng
from attention_jax.float_array import any_array, float_array
from attention_jax.heads import group_heads, ungroup_heads
from attention_jax.implementations import IMPLEMENTATIONS, BlockSizes, Inputs
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.choice import chosen_block_sizes, chosen_implementation
from attention_jax.masks import Mask, as_mask, causal_mask, local_mask, padding_mask
from attention_jax.position_functions import PositionFunction, broadcasts, pad_rank
from attention_jax.scores import Dot, Params, ScaledDot, Score, get_score

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
    score: str | Score = "scaled",
    params: Params = None,
) -> Any:
    """`jax.nn.dot_product_attention` with any score: the same arguments, then `score`, `params`.

        output_in = sum_j softmax_j(score(query_in, key_jk) + bias_nij where mask_nij) value_jk

    with k = n // G. Unlike `jax.nn`:
    - A query without keys gets output 0 and residual -inf, and sends no gradient (there: the mean
      of the values and a large negative residual; NaN where a bias of -inf does the masking).
      Beyond `query_seq_lengths` the output is 0 in both.
    - NaN in padding reaches nothing (there: from a value every output, from a key or query the
      gradients).
    - The residual can be differentiated (there: its gradient is 0).
    - `value` may have another size than `key`, dtypes may differ, and float64 is float64
      throughout (there: the softmax is float32). It also runs where JAX's dtype promotion is
      strict (there: float32 only).
    - Masks by causality, window and lengths are never stored as [T, S].
    - `mask` may be a `Mask` and `bias` a `Bias`, whose arrays' leading axes broadcast to [B, N].
    - Inputs of fewer than 3 axes, integer biases and windows of negative size are errors.

    Args:
        query: float [B, T, N, Dq] or [T, N, Dq].
        key: float [B, S, K, Dk] or [S, K, Dk], N a multiple of K.
        value: float [B, S, K, Dv] or [S, K, Dv].
        bias: float broadcastable to [B, N, T, S], or a `Bias`; added to the logits.
        mask: bool broadcastable to [B, N, T, S], or a `Mask`; True = may attend.
        scale: for score "scaled" only, in place of 1 / sqrt(Dk): a float; or a scalar array, and
            gradients reach it.
        is_causal: query i sees keys j <= i.
        query_seq_lengths: int [B], how many queries are real.
        key_value_seq_lengths: int [B], how many keys are.
        local_window_size: (left, right), or one int for both: query i sees keys
            i - left <= j <= i + right (and j <= i if causal).
        implementation: as in `attention_jax.attention`; not "xla" or "cudnn".
        return_residual: also return the logsumexp of each row of logits.
        score: a name in `SCORES`, "module:Name", or a `Score`.
        params: the score's parameters; leaves may have leading axes that broadcast to [B, N]: one
            set for each query head is [N, ...].

    Returns:
        output [B, T, N, Dv] or [T, N, Dv] in the query's dtype; or (output, residual), the residual
        [B, T, N] or [T, N] in the key's dtype, as in `jax.nn`.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure, or is not served here.

    >>> query, key = jnp.ones((1, 5, 6, 8)), jnp.ones((1, 7, 2, 8))  # 6 query heads, 2 key heads
    >>> dot_product_attention(query, key, key, is_causal=True).shape
    (1, 5, 6, 8)

    Source: the layout and argument names of `jax.nn.dot_product_attention`, jax 0.10.2 to 0.12.
    """
    score, params = _with_scale(get_score(score), params, scale)
    implementation = _not_jax_nns(implementation)
    query = float_array("query", query)
    unbatched = query.ndim == 3
    query = _four_axes("query", "[B, T, N, Dq] or [T, N, Dq]", query)
    key = _four_axes("key", "[B, S, K, Dk] or [S, K, Dk]", key)
    value = _four_axes("value", "[B, S, K, Dv] or [S, K, Dv]", value)
    lengths = _lengths_mask(key, query_seq_lengths, key_value_seq_lengths)
    masks = (mask, causal_mask() if is_causal else None, _window_mask(local_window_size), lengths)
    inputs = _checked(score, query, key, value, params, bias, *masks)
    results = _attend(score, inputs, implementation, None, return_statistics=bool(return_residual))
    if return_residual:
        results = (results[0], results[1].logsumexp.astype(key.dtype))
    examples = 0 if unbatched else slice(None)
    return jax.tree.map(lambda array: array.swapaxes(1, 2)[examples], results)


def flax_attention_fn(
    score: str | Score = "scaled",
    params: Params = None,
    *,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> nnx.Module:
    """An `attention_fn` for `flax.nnx.MultiHeadAttention` with any score.

    It is itself an `nnx.Module`, so that its parameters are part of the model that holds it:
    `nnx.split`, optimisers and checkpoints see them beside the model's own. Two layers given the
    same one share its parameters. With "scaled" it equals `flax.nnx.dot_product_attention`, but
    for queries that may attend to nothing (see `dot_product_attention`).

    What Flax passes is served: `mask` (any dtype, not 0 = may attend; or a `Mask`, so that
    `layer(x, mask=local_mask(8, 0))` stores no table), `is_causal`, `bias`, `dtype`, the caches of
    `decode`, grouped-query attention, dropout, and `sow_weights`, which stores the weights before
    dropout (they are then materialised). `broadcast_dropout` drops the same pairs in every example
    and head, as Flax's does; which ones, differs. `precision` has no effect: products are always
    exact in float32 or wider.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`; Dq and Dk are the layer's head_dim.
        params: the score's parameters; leaves may have leading axes that broadcast to [*B, N].
            Arrays become `nnx.Param`; an `nnx.Variable` stays what it is, and shared.
        implementation, block_sizes: as in `attention_jax.attention`.

    Returns:
        an `nnx.Module`; called as Flax calls it, it gives [*B, T, N, Dv].

    Raises:
        ValueError: there is no such score or implementation; when called: as in `attention`.

    >>> score = get_score("additive")  # 4 heads of size 8, each with parameters of its own:
    >>> params = jax.vmap(lambda rng: score.init(rng, 8, 8))(jax.random.split(jax.random.key(0), 4))
    >>> attend = flax_attention_fn(score, params)
    >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=attend, rngs=nnx.Rngs(1))
    >>> nnx.state(layer, nnx.Param)["attention_fn"]["params"]["v"].shape
    (4, 8)
    """
    return _FlaxAttention(get_score(score), params, _not_jax_nns(implementation), block_sizes)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


class _FlaxAttention(nnx.Module):
    """What `flax_attention_fn` returns."""

    def __init__(self, score, params, implementation, block_sizes):
        def as_variable(leaf):
            return leaf if _is_variable(leaf) else nnx.Param(jnp.asarray(leaf))

        params = {} if params is None else params
        self.params = nnx.data(jax.tree.map(as_variable, params, is_leaf=_is_variable))
        self.score = score
        self.implementation = implementation
        self.block_sizes = block_sizes

    def __call__(
        self, query: Array, key: Array, value: Array, bias: Array | None = None,
        mask: Mask | Array | None = None, broadcast_dropout: bool = True,
        dropout_rng: Array | None = None, dropout_rate: float = 0.0, deterministic: bool = False,
        dtype: Any = None, precision: Any = None, module: nnx.Module | None = None,
        promote_dtype: Any = flax_promote_dtype, is_causal: bool = False,
    ) -> Array:  # fmt: skip
        """The arguments of `flax.nnx.dot_product_attention`, in its order."""
        del precision  # never below float32
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        params = jax.tree.map(lambda leaf: leaf[...], self.params, is_leaf=_is_variable)
        if mask is not None and not isinstance(mask, Mask):
            mask = jnp.asarray(mask).astype(bool)  # Flax's own mask makers give float32
        causal = causal_mask() if is_causal else None
        inputs = _checked(self.score, query, key, value, params, bias, mask, causal)
        if module is not None:
            module.sow(nnx.Intermediate, "attention_weights", _weights(self.score, inputs))
        rate = 0.0 if deterministic else checked_rate(dropout_rate)
        if rate > 0:
            inputs = inputs._replace(dropout_rng=checked_rng(dropout_rng))
        options: Any = {"dropout_rate": rate, "broadcast_dropout": bool(broadcast_dropout)}
        output = _attend(self.score, inputs, self.implementation, self.block_sizes, **options)
        return jnp.swapaxes(output, -2, -3)


# --- arguments of `jax.nn.dot_product_attention` in the library's terms ---


@dataclasses.dataclass(frozen=True)
class _DotTimesScale(Dot):
    """e(q, k) = scale (q . k), with a scale that may be traced or learned."""

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {"scale": jnp.asarray(key_dim**-0.5)}

    def project(self, params: Params, query: Array, key: Array) -> tuple[Array, Array]:
        return query * params["scale"].astype(query.dtype), key


def _with_scale(score: Score, params: Params, scale: Any) -> tuple[Score, Params]:
    if scale is None:
        return score, params
    if score != ScaledDot() or any_array("scale", scale).shape != ():
        raise ValueError(
            "scale must be None, or one number where score is 'scaled' without a scale of its own;"
            f" got {scale!r} with score {score}"
        )
    if isinstance(scale, numbers.Real):
        return ScaledDot(float(scale)), params
    return _DotTimesScale(), {**(params or {}), "scale": scale}


def _not_jax_nns(implementation: Any) -> str | None:
    if implementation in ("xla", "cudnn"):
        raise ValueError(
            f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; got jax.nn's"
            f" {implementation!r}: leave it out, or call jax.nn.dot_product_attention"
        )
    return checked_implementation(implementation)


def _four_axes(name: str, shape: str, value: ArrayLike) -> Array:
    array = float_array(name, value)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name} must be {shape}; got {list(array.shape)}")
    return pad_rank(array, 4)


def _window_mask(size: int | tuple[int, int] | None) -> Mask | None:
    if size is None:
        return None
    try:
        left, right = size if isinstance(size, (tuple, list)) else (size, size)
        return local_mask(operator.index(left), operator.index(right))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"local_window_size must be an int or (left, right), each at least 0; got {size!r}"
        ) from error


def _lengths_mask(key: Array, queries: Any, keys: Any) -> Mask | None:
    batch_size, source_length = key.shape[:2]
    lengths = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
    given = {name: any_array(name, x) for name, x in lengths.items() if x is not None}
    for name, array in given.items():
        if array.shape != (batch_size,) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers [{batch_size}]; got {array.dtype} {list(array.shape)}"
            )
    if not given:
        return None
    given.setdefault("key_value_seq_lengths", jnp.full(batch_size, source_length))
    # [B, 1]: the second axis broadcasts to the heads.
    queries, keys = (None if given.get(name) is None else given[name][:, None] for name in lengths)
    return padding_mask(keys, queries)


# --- what both doors share ---


def _checked(score: Score, query, key, value, params, bias, *masks) -> Inputs:
    """`Inputs` as the doors take them, positions before heads; or a ValueError."""
    _check_layout(query, key, value)
    for name, pairs in (("bias", bias), *(("mask", mask) for mask in masks)):
        _check_pairs(name, pairs, query, key)
    given = [as_mask(mask) for mask in masks if mask is not None]
    mask = functools.reduce(operator.and_, given) if given else None

    def with_own_heads(x: Array) -> jax.ShapeDtypeStruct:
        shape = (*x.shape[:-3], query.shape[-2], x.shape[-3], x.shape[-1])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    # The front door judges the rest, as if every query head had a key head of its own.
    check = functools.partial(checked_inputs, score, params=params, mask=mask, bias=bias)
    jax.eval_shape(check, *map(with_own_heads, (query, key, value)))
    params = jax.tree.map(jnp.asarray, {} if params is None else params)
    if bias is not None:
        bias = as_bias(bias)
    return Inputs(query, key, value, params, mask, bias, None)


_SWAPPED = "; if the heads come before the positions in query, key and value, swap these two axes"


def _check_layout(query: Array, key: Array, value: Array) -> None:
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


def _check_pairs(name: str, pairs: Any, query: Array, key: Array) -> None:
    """A mask or bias that would fit inputs with the two axes swapped gives away that they are."""
    if pairs is None or isinstance(pairs, PositionFunction):
        return
    (*batch, length, heads, _), (source_length, key_heads) = query.shape, key.shape[-3:-1]
    full, shape = (*batch, heads, length, source_length), any_array(name, pairs).shape
    if not broadcasts(shape, full):
        hint = _SWAPPED if broadcasts(shape, (*batch, length, heads, key_heads)) else ""
        raise ValueError(
            f"{name} must broadcast to {list(full)} (*B, N, T, S); got {list(shape)}{hint}"
        )


def _attend(
    score: Score, inputs: Inputs, implementation: str | None, block_sizes: BlockSizes | None,
    *, dropout_rate: float = 0.0, broadcast_dropout: bool = False, return_statistics: bool = False,
) -> Any:  # fmt: skip
    """Of each head: output [*B, N, T, Dv]; or (output, statistics)."""
    inputs = _by_group(score, inputs)
    arguments: Any = {
        "score": score,
        "dropout_rate": dropout_rate,
        # Chosen for all heads together, where `attention` may see one.
        "implementation": implementation
        or chosen_implementation(score, inputs, jax.default_backend()),
        "block_sizes": block_sizes or chosen_block_sizes(score, inputs),
        "return_statistics": return_statistics,
    }
    if not (broadcast_dropout and dropout_rate > 0):
        with heads_as_one_axis(inputs.query.ndim - 4):
            return _heads_together(attention(**inputs._asdict(), **arguments), inputs)

    def of_head(head: Inputs, dropout_rng: Array) -> Any:
        return attention(**head._replace(dropout_rng=dropout_rng)._asdict(), **arguments)

    # `attention` would split the key, so that every head had its own.
    assert inputs.dropout_rng is not None  # the front door has checked
    shared = (inputs.dropout_rng, 0)
    heads = vmap_over_batch(
        score, of_head, inputs._replace(dropout_rng=None), shared, by_query=True
    )
    return _heads_together(heads, inputs)


def _weights(score: Score, inputs: Inputs) -> Array:
    """Weights [*B, N, T, S]."""
    inputs = _by_group(score, inputs)
    query, key, _, params, mask, bias, _ = inputs
    weights = attention_weights(query, key, score=score, params=params, mask=mask, bias=bias)
    return _heads_together(weights, inputs)


def _by_group(score: Score, inputs: Inputs) -> Inputs:
    """Batch axes [*B, K, G] in front; keys and values have size 1 on the last: they are shared."""
    query, key, value = (jnp.swapaxes(array, -2, -3) for array in inputs[:3])
    grouped = functools.partial(group_heads, key_heads=key.shape[-3])
    param_shapes = score.param_shapes(inputs.params, query.shape[-1], key.shape[-1])
    param_ndims = jax.tree.map(lambda leaf: len(leaf.shape), param_shapes)
    params = jax.tree.map(grouped, inputs.params, param_ndims)
    mask, bias = inputs.mask, inputs.bias
    mask = None if mask is None else jax.tree.map(grouped, mask, mask.core_ndims())
    bias = None if bias is None else jax.tree.map(grouped, bias, bias.core_ndims())
    key, value = key[..., None, :, :], value[..., None, :, :]
    return Inputs(grouped(query, 2), key, value, params, mask, bias, inputs.dropout_rng)


def _heads_together(results: Any, inputs: Inputs) -> Any:
    """[*B, K, G, ...] as [*B, N, ...]."""
    return ungroup_heads(results, inputs.query.ndim - 4)
