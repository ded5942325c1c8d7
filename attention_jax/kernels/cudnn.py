"""cuDNN's fused attention on NVIDIA GPUs, for every score that is a dot product of features.

The score projects queries and keys as for every implementation, and the features go to
`jax.nn.dot_product_attention(implementation="cudnn")` with scale 1. What cuDNN cannot do raises
NotImplementedError before anything compiles: `reason_against` lists it.

cuDNN never sees what the mask hides. Tokens in no allowed pair are replaced before it runs, an
example without keys attends to one stand-in key, and the rows without keys are replaced outside:
their output is 0, and so is their cotangent. So every row that cuDNN computes has a key, and all
numbers are finite. The derivatives of derivatives, and forward mode, are those of `plain_tiles`.

cuDNN takes a batch of heads, [B, T, N, H], with N = 1 here: all batch axes become B. Keys and
values that several heads share are copied for each of them.

Source: Dao et al. 2022 and 2023, whose algorithm cuDNN implements.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.implementations import plain_tiles, reference, tile_arrays, tiling
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.implementations.features import projected
from attention_jax.kernels.windows import (
    WINDOW_MASKS,
    bounds_of,
    parts_of,
    smallest_lengths,
)
from attention_jax.normalizers import Softmax
from attention_jax.pairwise.masks import LocalMask, Mask, PaddingMask, padding_mask
from attention_jax.scores import Dot, is_dot_product, stand_in_key, stand_in_query

Array = jax.Array

LIBRARY = "cudnn"  # the implementation of `jax.nn.dot_product_attention`; tests use "xla"
LARGEST_HEAD = 128  # features or values; cuDNN takes 256 on a part of its GPUs
_HEAD_MULTIPLE = 8


def attend(options: Options, inputs: Inputs) -> tuple[Array, None]:
    """One example: output [T, Dv] in the query's dtype; there are no statistics."""
    reason = reason_against(options, inputs)
    if reason is not None:
        raise NotImplementedError(f"implementation 'cudnn' {reason}: use 'tiled', or None")
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    if 0 in lengths:
        return reference.attend(options, inputs)[0], None  # no pairs
    band = _band(options, inputs.mask)
    key_length, query_length = smallest_lengths(inputs.mask, *lengths)
    has_keys, used_keys = _used_tokens(band, lengths, query_length, key_length)
    params, query, key = cast_floats(
        (inputs.params, inputs.query, inputs.key), inputs.compute_dtype
    )
    query = _replaced(query, has_keys, stand_in_query(query))
    key = jax.tree.map(lambda tokens: _replaced(tokens, used_keys, stand_in_key(tokens)), key)
    value = _replaced(inputs.value, used_keys, 0)
    q_features, k_features = projected(options.score, inputs, params, query, key)
    if key_length is not None:
        key_length = jnp.maximum(key_length, 1)  # the stand-in key of an example without keys
    output = _attend(band, q_features, k_features, value, key_length)
    return _replaced(output, has_keys, 0), None


def reason_against(options: Options, inputs: Inputs) -> str | None:
    """Why cuDNN cannot compute this; None if it can. `inputs` may have batch axes."""
    dtypes = {leaf.dtype for leaf in (inputs.query, inputs.value, *jax.tree.leaves(inputs.key))}
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if not is_dot_product(options.score):
        return f"needs a score that is a dot product of features; got {options.score}"
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return f"needs query, key and value in bfloat16, or all in float16; got {names}"
    if options.normalizer != Softmax():
        return f"computes softmax without a sink; got normalizer {options.normalizer}"
    if options.return_statistics:
        return "returns no max_logit and no entropy, so it needs return_statistics=False"
    if options.dropout_rate > 0:
        return f"cannot draw the dropout of dropout_rng; got dropout_rate {options.dropout_rate}"
    if inputs.bias is not None:
        return "would store the bias as a table [T, S] in 16 bits; got a bias"
    if inputs.damping is not None:
        return "does not multiply weights by a Gaussian"
    if is_symbolic_dim(target_length) or is_symbolic_dim(source_length):
        return f"needs known lengths; got T = {target_length}, S = {source_length}"
    features = _feature_shapes(options, inputs)
    if features.dtype.itemsize != 2:
        return f"needs features in 16 bits; score {options.score} keeps those in {features.dtype}"
    sizes = features.shape[-1], inputs.value.shape[-1]
    if max(sizes) > LARGEST_HEAD or min(sizes) == 0:
        return f"takes 1 to {LARGEST_HEAD} features and values per head; got {sizes}"
    return _reason_against_mask(inputs.mask, target_length, source_length)


# --- masks ---


class _Band(NamedTuple):
    """The static part: query i sees the keys i - left <= j <= i if `causal`, else all."""

    causal: bool
    left: int | None  # None for no bound
    blocks: BlockSizes  # of the tiles that derivatives of derivatives use

    def mask(self, key_length: Array | None) -> Mask | None:
        """The mask that cuDNN applies."""
        band = LocalMask(self.left, 0) if self.causal else None
        if key_length is None:
            return band
        padding = padding_mask(key_length)
        return padding if band is None else padding & band


def _reason_against_mask(mask: Mask | None, target_length: int, source_length: int) -> str | None:
    parts = parts_of(mask)
    for part in parts:
        if not isinstance(part, WINDOW_MASKS):
            return (
                "takes causal_mask(), local_mask(left, 0), padding_mask(...) and their"
                f" conjunctions, and would store other masks as tables [T, S]; got {part}"
            )
    left, right = bounds_of(mask)
    if (left is not None or right is not None) and right != 0:
        return f"takes windows that end at the query's position; got left {left}, right {right}"
    padded = any(isinstance(part, PaddingMask) for part in parts)
    if left is not None and (padded or target_length > source_length + left):
        return "gives NaN gradients where a window has no keys: no padding or T > S + left with it"
    return None


def _band(options: Options, mask: Mask | None) -> _Band:
    left, right = bounds_of(mask)
    return _Band(causal=right is not None, left=left, blocks=options.block_sizes)


def _used_tokens(
    band: _Band, lengths: tuple[int, int], query_length: Array | None, key_length: Array | None
) -> tuple[Array | None, Array | None]:
    """Which queries have keys, bool [T], and which keys have queries, bool [S]; None for all."""
    queries, keys = map(jnp.arange, lengths)
    if key_length is None or query_length is None:
        # A window without padding leaves no query without keys.
        return None, (keys < lengths[0] if band.causal and lengths[1] > lengths[0] else None)
    # Key j is the last that query j sees, so some query sees it if query j does.
    last = query_length if band.causal else jnp.where(query_length > 0, lengths[1], 0)
    return (queries < query_length) & (key_length > 0), keys < jnp.minimum(key_length, last)


def _replaced(tokens: Array, used: Array | None, filler: Array | float) -> Array:
    """Tokens [length, D] with `filler` in place of those that are not used."""
    if used is None:
        return tokens
    filler = jnp.asarray(filler, tokens.dtype)
    return jnp.where(used.reshape(-1, *[1] * (tokens.ndim - 1)), tokens, filler)


# --- the call of the library, and its derivatives ---


def _plain(
    band: _Band, queries: Array, keys: Array, values: Array, key_length: Array | None
) -> Array:
    """The same attention by plain tiles, which JAX differentiates in every way."""
    inputs = Inputs(queries, keys, values, {}, band.mask(key_length), None, None, {})
    output, _ = plain_tiles.attend_tiles(*tiling.prepare(Options(Dot(), band.blocks), inputs))
    return tile_arrays.untiled(output, queries.shape[0]).astype(queries.dtype)


@functools.cache
def _library_programs() -> tuple[Any, ...]:
    """A program that calls the library: JAX has to know the devices to lower it."""
    token = jax.ShapeDtypeStruct((1, _HEAD_MULTIPLE), jnp.bfloat16)
    call = functools.partial(_call_library, _Band(False, None, BlockSizes()), None)
    return (jax.make_jaxpr(call)(token, token, token).jaxpr,)


@functools.partial(custom_vjp, nondiff_argnums=(0,), twin=_plain, shown=_library_programs)
def _attend(
    band: _Band, queries: Array, keys: Array, values: Array, key_length: Array | None
) -> Array:
    """Output [T, Dv] of features [T, F] and [S, F], all finite; every query sees some key."""
    arrays = _with_equal_batches(queries, keys, values, key_length)
    return _call_library(band, arrays[3], *arrays[:3])


def _attend_fwd(band, queries, keys, values, key_length):
    arrays = _with_equal_batches(queries, keys, values, key_length)
    # The forward pass of a gradient saves the rows' logsumexp too.
    output, _ = jax.vjp(functools.partial(_call_library, band, arrays[3]), *arrays[:3])
    return output, (queries, keys, values, key_length)


def _attend_bwd(band, residuals, doutput):
    *arrays, key_length, doutput = _with_equal_batches(*residuals, doutput)
    # Within one program XLA merges this forward pass with that of `_attend_fwd`.
    _, pull_back = jax.vjp(functools.partial(_call_library, band, key_length), *arrays)
    return *pull_back(doutput), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _call_library(
    band: _Band, key_length: Array | None, queries: Array, keys: Array, values: Array
) -> Array:
    size = max(queries.shape[-1], values.shape[-1])
    size = _HEAD_MULTIPLE * math.ceil(size / _HEAD_MULTIPLE)
    key_lengths, query_lengths = None, None
    if key_length is not None:
        # An array of its own: JAX's default for it would lack the batch axes.
        key_lengths = key_length[None]
        query_lengths = 0 * key_lengths + queries.shape[0]
    library: Any = LIBRARY  # for mypy, which knows the two names
    try:
        output = jax.nn.dot_product_attention(
            _one_head(queries, size),
            _one_head(keys, size),
            _one_head(values, size),
            scale=1.0,
            is_causal=band.causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=None if band.left is None else (band.left, 0),
            implementation=library,
        )
    except RuntimeError as error:  # JAX found no cuDNN
        raise NotImplementedError(
            f"implementation 'cudnn' needs the CUDA plugin of JAX: {error}"
        ) from error
    return output[0, :, 0, : values.shape[-1]]


def _one_head(tokens: Array, size: int) -> Array:
    """[length, D] -> [B, length, N, size] with B = N = 1, padded by zeros."""
    return jnp.pad(tokens, ((0, 0), (0, size - tokens.shape[-1])))[None, :, None, :]


@jax.custom_batching.custom_vmap
def _with_equal_batches(*arrays: Any) -> tuple[Any, ...]:
    """The arrays as they are; under `jax.vmap` all have the batch axis, in front.

    JAX's batching rule of cuDNN demands it.
    """
    return arrays


@_with_equal_batches.def_vmap
def _batch_all(axis_size: int, in_batched: Any, *arrays: Any) -> tuple[Any, Any]:
    def batch(array: Array, batched: bool) -> Array:
        return array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))

    batched = jax.tree.map(batch, arrays, tuple(in_batched))
    return _with_equal_batches(*batched), jax.tree.map(lambda _: True, batched)


def _feature_shapes(options: Options, inputs: Inputs) -> Any:
    """The shape and dtype of the key features of one example, after rounding."""

    def token(tokens: Any) -> Any:
        return jax.ShapeDtypeStruct((1, *tokens.shape[-1:]), tokens.dtype)

    shapes = options.score.param_shapes(inputs.params, inputs.query.shape[-1], inputs.key.shape[-1])
    one = inputs._replace(
        query=token(inputs.query),
        key=jax.tree.map(token, inputs.key),
        params=jax.tree.map(
            lambda shape, leaf: jax.ShapeDtypeStruct(shape.shape, leaf.dtype), shapes, inputs.params
        ),
    )

    def key_features(query: Array, key: Any, params: Any) -> Any:
        dtype = inputs.compute_dtype
        tokens = cast_floats((params, query, key), dtype)
        return projected(options.score, inputs, *tokens)[1]

    return jax.eval_shape(key_features, one.query, one.key, one.params)
