"""cuDNN's fused attention on NVIDIA GPUs, for every score that is a dot product of features.

The score projects queries and keys as for every implementation, and the features go to
`jax.nn.dot_product_attention(implementation="cudnn")` with scale 1. What cuDNN cannot do raises
NotImplementedError before anything compiles: `reason_against` lists it.

cuDNN never sees what the mask hides. Tokens in no allowed pair are replaced before it runs, an
example without keys attends to one stand-in key, and the rows without keys are replaced outside:
their output is 0, and so is their cotangent. So every row that cuDNN computes has a key, and all
numbers are finite. Forward mode and higher derivatives are those of `tiled`.

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

from attention_jax.core.programs import one_line
from attention_jax.implementations.contract import Inputs, Options
from attention_jax.kernels import tokens
from attention_jax.kernels.choice import nvidia_generation
from attention_jax.kernels.rule import Call, Kernels, attention_by
from attention_jax.kernels.tokens import Operands
from attention_jax.kernels.windows import Bounds, Windows, bounds_of
from attention_jax.scores import is_dot_product
from attention_jax.scores.projected_keys import key_feature_shapes

Array = jax.Array

LIBRARY = "cudnn"  # the implementation of `jax.nn.dot_product_attention`; tests use "xla"
LARGEST_HEAD = 256  # features or values, on the newest GPUs; `_refusal` asks the one at hand
_HEAD_MULTIPLE = 8


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
    left, right, padded = bounds_of(inputs.mask)
    if (left is not None or right is not None) and right != 0:
        return f"takes windows that end at the query's position; got left {left}, right {right}"
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if left is not None and (padded or target_length > source_length + left):
        return "takes windows with no padding and T <= S + left: one without keys would give NaN"
    return _refusal(LIBRARY, _padded_size(*sizes), features.dtype)


@functools.lru_cache(maxsize=64)
def _refusal(library: Any, size: int, dtype: Any) -> str | None:
    """What JAX, and the compiler of the GPU at hand, say against heads of this size; None: nothing.

    Without a GPU, a program is compiled for one that is not there: JAX alone is asked.
    """

    def gradient(tokens: Array) -> Any:
        attend = functools.partial(jax.nn.dot_product_attention, implementation=library)
        return jax.vjp(lambda tokens: attend(tokens, tokens, tokens), tokens)[1](tokens)

    try:
        traced = jax.jit(gradient).trace(jax.ShapeDtypeStruct((1, 8, 1, size), dtype))
        if nvidia_generation() is not None:
            with jax.default_device(jax.local_devices(backend="gpu")[0]):
                traced.lower().compile()
    except RuntimeError as error:  # NotImplementedError is one
        return f"cannot run here: {one_line(error)}"
    return None


def _padded_size(features: int, values: int) -> int:
    """The size to which the library's features and values are padded by zeros."""
    return _HEAD_MULTIPLE * math.ceil(max(features, values) / _HEAD_MULTIPLE)


# --- the call of the library, and its derivatives ---


def _forward(call: Call, operands: Operands, windows: Windows | None) -> tuple[Array, None]:
    library, features, has_keys = _prepared(call, windows, *operands[:3])
    # The forward pass of a gradient saves the rows' logsumexp too.
    output = jax.vjp(library, *features)[0] if call.has_gradient else library(*features)
    return _with_keys(output, has_keys), None


def _backward(
    call: Call, operands: Operands, windows: Windows | None, terms: None, doutput: Array
) -> Operands:
    library, (*features, doutput), has_keys = _prepared(call, windows, *operands[:3], doutput)
    # Within one program XLA merges this forward pass with that of `_forward`.
    _, pull_back = jax.vjp(library, *features)
    dqueries, dkeys, dvalues = pull_back(_with_keys(doutput, has_keys))
    dparams = jax.tree.map(jnp.zeros_like, operands.params)
    return Operands(dqueries, dkeys, dvalues, dparams)


def _prepared(call: Call, windows: Windows | None, *arrays: Array) -> tuple[Any, list[Array], Any]:
    """What the library reads: all numbers are finite, and every query sees some key.

    Returns:
        a function of queries, keys and values, the arrays, and which queries have keys, bool [T];
        None where padding hides nothing.
    """
    key_length, has_keys = None, None
    if call.bounds.padded:
        assert windows is not None
        # An example without keys has one stand-in key.
        key_length = jnp.maximum(jnp.max(windows.end), 1)
        has_keys = windows.end > windows.first
    *batched, key_length = _with_equal_batches(*arrays, key_length)
    return functools.partial(_call_library, call.bounds, key_length), batched, has_keys


def _with_keys(rows: Array, has_keys: Array | None) -> Array:
    """Rows [T, Dv], 0 for a query without keys."""
    return rows if has_keys is None else jnp.where(has_keys[:, None], rows, 0)


def _call_library(
    bounds: Bounds, key_length: Array | None, queries: Array, keys: Array, values: Array
) -> Array:
    """Output [T, Dv]."""
    size = _padded_size(queries.shape[-1], values.shape[-1])
    key_lengths, query_lengths = None, None
    if key_length is not None:
        # An array of its own: JAX's default for it would lack the batch axes.
        key_lengths = key_length[None]
        query_lengths = 0 * key_lengths + queries.shape[0]
    library: Any = LIBRARY  # for mypy, which knows the two names
    output = jax.nn.dot_product_attention(
        _one_head(queries, size),
        _one_head(keys, size),
        _one_head(values, size),
        scale=1.0,
        is_causal=bounds.right is not None,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=None if bounds.left is None else (bounds.left, 0),
        implementation=library,
    )
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
        lambda features: options.score.round(features, "key", inputs.token_dtype), features
    )


# cuDNN takes any length: one tile is the whole.
_KERNELS = Kernels("cudnn", reason_against, lambda options, *lengths: lengths, _forward, _backward)
attend = attention_by(_KERNELS)
