"""cuDNN's fused attention on NVIDIA GPUs, for every score that is a dot product of features.

The score projects queries and keys as for every implementation, and the features go to
`jax.nn.dot_product_attention(implementation="cudnn")` with scale 1. What cuDNN cannot do raises
NotImplementedError before anything compiles: `reason_against` lists it.

cuDNN never sees what the mask hides. Tokens in no allowed pair are replaced before it runs, an
example without keys attends to one stand-in key, and the rows without keys are replaced outside:
their output is 0, and so is their cotangent. So every row that cuDNN computes has a key, and all
numbers are finite. The derivatives of derivatives, and forward mode, are those of `tiled`.

cuDNN takes a batch of heads, [B, T, N, H], with N = 1 here: all batch axes become B. Keys and
values that several heads share are copied for each of them.

Source: Dao et al. 2022 and 2023, whose algorithm cuDNN implements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.implementations import reference
from attention_jax.implementations.contract import Inputs, Options
from attention_jax.kernels import tokens
from attention_jax.kernels.rule import in_float32
from attention_jax.kernels.windows import bounds_of, parts_of, windows_of
from attention_jax.pairwise.masks import Mask, PaddingMask
from attention_jax.scores import is_dot_product
from attention_jax.scores.projected_keys import key_feature_shapes

Array = jax.Array

LIBRARY = "cudnn"  # the implementation of `jax.nn.dot_product_attention`; tests use "xla"
LARGEST_HEAD = 128  # features or values; cuDNN takes 256 on a part of its GPUs
_HEAD_MULTIPLE = 8


def attend(options: Options, inputs: Inputs) -> tuple[Array, None]:
    """One example: output [T, Dv] in the query's dtype; there are no statistics."""
    tokens.refuse("cudnn", reason_against(options, inputs))
    if 0 in (inputs.query.shape[0], inputs.key.shape[0]):
        return reference.attend(options, inputs)[0], None  # no pairs
    return _attend(options, inputs), None


def reason_against(options: Options, inputs: Inputs) -> str | None:
    """Why cuDNN cannot compute this; None if it can. `inputs` may have batch axes."""
    dtypes = {leaf.dtype for leaf in (inputs.query, inputs.value, *jax.tree.leaves(inputs.key))}
    if not is_dot_product(options.score):
        return f"needs a score that is a dot product of features; got {options.score}"
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return f"needs query, key and value in bfloat16, or all in float16; got {names}"
    if options.return_statistics:
        return "returns no max_logit and no entropy, so it needs return_statistics=False"
    if reason := tokens.reason_against(options, inputs):
        return reason
    features = _feature_shapes(options, inputs)
    if features.dtype.itemsize != 2:
        return f"needs features in 16 bits; score {options.score} keeps those in {features.dtype}"
    sizes = features.shape[-1], inputs.value.shape[-1]
    if max(sizes) > LARGEST_HEAD or min(sizes) == 0:
        return f"takes 1 to {LARGEST_HEAD} features and values per head; got {sizes}"
    return _reason_against_window(inputs.mask, inputs.query.shape[-2], inputs.key.shape[-2])


def _reason_against_window(mask: Mask | None, target_length: int, source_length: int) -> str | None:
    left, right = bounds_of(mask)
    if (left is not None or right is not None) and right != 0:
        return f"takes windows that end at the query's position; got left {left}, right {right}"
    padded = any(isinstance(part, PaddingMask) for part in parts_of(mask))
    if left is not None and (padded or target_length > source_length + left):
        return "gives NaN gradients where a window has no keys: no padding or T > S + left with it"
    return None


# --- the call of the library, and its derivatives ---


def _prepared(options: Options, inputs: Inputs) -> tuple[tuple[Array, ...], tuple[Any, Any]]:
    """What the library reads: all numbers are finite, and every query sees some key.

    Returns:
        (features [T, F] and [S, F], values [S, Dv]), and (the number of keys, int32 [], and which
        queries have keys, bool [T]); the last two are None where padding hides nothing.
    """
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    padded = any(isinstance(part, PaddingMask) for part in parts_of(inputs.mask))
    windows, key_length, has_keys = None, None, None
    if padded or (bounds_of(inputs.mask)[1] is not None and lengths[1] > lengths[0]):
        windows = windows_of(inputs.mask, *lengths)
    queries, keys, values, _ = tokens.operands_of(options, inputs, windows, *lengths)
    if padded:
        assert windows is not None
        # An example without keys has one stand-in key.
        key_length = jnp.maximum(jnp.max(windows.end), 1)
        has_keys = windows.end > windows.first
    return (queries, keys, values), (key_length, has_keys)


@functools.partial(
    custom_vjp,
    nondiff_argnums=(0,),
    twin=lambda options, inputs: in_float32(options, inputs)[0],
)
def _attend(options: Options, inputs: Inputs) -> Array:
    """Output [T, Dv] of one example."""
    features, (key_length, has_keys) = _prepared(options, inputs)
    *features, key_length = _with_equal_batches(*features, key_length)
    return _with_keys(_call_library(inputs.mask, key_length, *features), has_keys)


def _attend_fwd(options, inputs):
    features, (key_length, has_keys) = _prepared(options, inputs)
    *features, key_length = _with_equal_batches(*features, key_length)
    # The forward pass of a gradient saves the rows' logsumexp too.
    output, _ = jax.vjp(functools.partial(_call_library, inputs.mask, key_length), *features)
    return _with_keys(output, has_keys), inputs


def _attend_bwd(options, inputs, doutput):
    features, pull_back, (key_length, has_keys) = jax.vjp(
        functools.partial(_prepared, options), inputs, has_aux=True
    )
    doutput = _with_keys(doutput, has_keys)
    *features, key_length, doutput = _with_equal_batches(*features, key_length, doutput)
    # Within one program XLA merges this forward pass with that of `_attend_fwd`.
    _, pull_back_features = jax.vjp(
        functools.partial(_call_library, inputs.mask, key_length), *features
    )
    return pull_back(pull_back_features(doutput))


_attend.defvjp(_attend_fwd, _attend_bwd)


def _with_keys(rows: Array, has_keys: Array | None) -> Array:
    """Rows [T, Dv], 0 for a query without keys."""
    return rows if has_keys is None else jnp.where(has_keys[:, None], rows, 0)


def _call_library(
    mask: Mask | None, key_length: Array | None, queries: Array, keys: Array, values: Array
) -> Array:
    """Output [T, Dv]; padding in the mask is passed over."""
    left, right = bounds_of(mask)
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
            is_causal=right is not None,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=None if left is None else (left, 0),
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
    """The shape and dtype of the key features of one token, after rounding."""
    sizes = inputs.query.shape[-1], inputs.key.shape[-1]
    features = key_feature_shapes(options.score, inputs.params, *sizes, 1)
    return jax.eval_shape(
        lambda features: options.score.round(features, inputs.token_dtype), features
    )
