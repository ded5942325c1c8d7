"""cuDNN's fused attention on NVIDIA GPUs, for every score that is a dot product of features.

The score projects queries and keys as for every implementation, and the features go to
`jax.nn.dot_product_attention(implementation="cudnn")`. What cuDNN cannot do raises
NotImplementedError before anything compiles: `reason_against` lists it.

cuDNN never sees what the mask hides. Tokens in no allowed pair are replaced before it runs, an
example without keys attends to one stand-in key, and the rows without keys are replaced outside:
their output is 0, and so is their cotangent. So every row that cuDNN computes has a key, and all
numbers are finite. Forward mode and higher derivatives are those of `tiled`.

cuDNN takes queries [B, T, N, H] and keys [B, S, K, H], where N / K query heads share a key head. So
this implementation takes the whole batch: the batch axes that keys and values lack, or have with
size 1, become heads that share a key head, and nothing is copied. The derivative rule surrounds the
batch, and cuDNN sums the gradients of a shared key.

Source: Dao et al. 2022 and 2023, whose algorithm cuDNN implements.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.core.errors import one_line
from attention_jax.kernels import preparation
from attention_jax.kernels.windows import bounds_of
from attention_jax.positions.contract import AndMask, members
from attention_jax.positions.masks import TracedLocalMask
from attention_jax.scores import Dot, ScaledDot, Score, is_dot_product
from attention_jax.scores.projected_keys import ProjectedKeys, key_feature_shapes
from attention_jax.tiles.options import Inputs, Options, core_ndims, map_over_batch, vmap_over_batch

Array = jax.Array

LIBRARY = "cudnn"  # the implementation of `jax.nn.dot_product_attention`; tests use "xla"
LARGEST_HEAD = 256  # features or values, on the newest GPUs; `_refusal` asks the one at hand
_HEAD_MULTIPLE = 8
CUDNN_GENERATION = 8.0  # the compute capability from which cuDNN has fused attention: Ampere


def nvidia_generation() -> float | None:
    """The compute capability of the first GPU: 9.0 for Hopper, and 0 for another maker's GPU.

    None if JAX sees no GPU: a program is then compiled for one that is not there.
    """
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if jax.default_backend() != "gpu" or not gpus:
        return None
    try:
        return float(gpus[0].compute_capability)
    except (AttributeError, ValueError):  # AMD's are names, such as gfx942
        return 0.0


def attend(options: Options, inputs: Inputs) -> tuple[Array, None]:
    """A whole batch: output [*B, T, Dv] in the query's dtype."""
    preparation.refuse("cudnn", reason_against(options, inputs))
    if 0 in (*inputs.query.shape, *inputs.value.shape):
        return _twin_of_batch(options, inputs), None  # cuDNN takes no empty arrays
    return _fused(options, inputs), None


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
    if reason := preparation.reason_against_call(options, inputs):
        return reason
    dims = inputs.query.shape[-1], inputs.key.shape[-1]
    features = jax.eval_shape(
        lambda features: options.score.round(features, "key", inputs.token_dtype),
        key_feature_shapes(options.score, inputs.params, *dims, 1),
    )
    if features.dtype.itemsize != 2:
        return f"needs features in 16 bits; score {options.score} keeps those in {features.dtype}"
    sizes = features.shape[-1], inputs.value.shape[-1]
    if max(sizes) > LARGEST_HEAD or min(sizes) == 0:
        return f"takes 1 to {LARGEST_HEAD} features and values per head; got {sizes}"
    if any(isinstance(part, TracedLocalMask) for part in members(inputs.mask, AndMask)):
        return "takes causal_mask(...) and local_mask(...) of integers; got one of arrays"
    left, right, padded = bounds_of(inputs.mask)
    if (left is not None or right is not None) and right != 0:
        return f"takes windows that end at the query's position; got left {left}, right {right}"
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    # A key that `_output` adds is behind all queries then, and a query that it adds has a key.
    most = source_length if source_length % 2 else source_length + (left or 0) - target_length % 2
    if left is not None and (padded or target_length > most):
        return f"takes this window with at most {most} queries and no padding; got {target_length}"
    generation = nvidia_generation()
    if generation is not None and generation < CUDNN_GENERATION:
        return f"needs an NVIDIA GPU of compute capability {CUDNN_GENERATION}; got {generation}"
    return _refusal(LIBRARY, _padded_size(*sizes), features.dtype)


@functools.lru_cache(maxsize=64)
def _refusal(library: Any, size: int, dtype: Any) -> str | None:
    """Why JAX or the GPU's compiler refuses heads of this size; None if neither does.

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


# --- the call of the library ---


def _output(options: Options, inputs: Inputs, *, even: bool = False) -> Array:
    """Output [*B, T, Dv].

    With `even`, T and S are padded to even numbers, as JAX demands of a gradient.

    The library's axes are B, tokens, key heads and the heads that share a key head, features. The
    last batch axis of the keys is that of the key heads, if it is not the first axis and its
    examples have the same padding; the others are B. So these transpositions and those of a model
    with arrays [B, T, N, H] cancel.
    """
    scale, (features, has_keys, key_length) = _library_arguments(options, inputs, even)
    *batch_shape, target_length, _ = features[0].shape
    ndim, value_dim = len(batch_shape), inputs.value.shape[-1]
    shared = [axis for axis in range(ndim) if features[1].shape[axis] == 1]
    batch = [axis for axis in range(ndim) if axis not in shared]
    heads = []
    if batch and batch[-1] > 0 and (key_length is None or key_length.shape[batch[-1]] == 1):
        heads = [batch.pop()]
    order = [*batch, ndim, *heads, *shared, ndim + 1]
    size = _padded_size(features[0].shape[-1], value_dim)
    left, right, _ = bounds_of(inputs.mask)

    def with_heads(tokens: Array) -> Array:
        """[*B, length, D] -> [B, length, N, size], padded by zeros."""
        padding = [(0, 0)] * ndim + [(0, even * tokens.shape[-2] % 2), (0, size - tokens.shape[-1])]
        tokens = jnp.pad(tokens, padding).transpose(order)
        examples = math.prod(tokens.shape[: len(batch)])
        return tokens.reshape(examples, tokens.shape[len(batch)], -1, size)

    key_lengths, query_lengths = None, None
    if key_length is not None:
        # An array of its own: JAX's default for it would lack the batch axes.
        sizes = [batch_shape[axis] if axis in batch else 1 for axis in range(ndim)]
        key_lengths = jnp.broadcast_to(key_length, sizes).reshape(-1)
        query_lengths = 0 * key_lengths + target_length
    library: Any = LIBRARY  # for mypy, which knows the two names
    output = jax.nn.dot_product_attention(
        *map(with_heads, features),
        scale=scale,
        is_causal=right is not None,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=None if left is None else (left, 0),
        implementation=library,
    )
    sizes = [(*batch_shape, output.shape[1], size)[axis] for axis in order]
    output = output.reshape(sizes).transpose(np.argsort(order))[..., :target_length, :value_dim]
    return output if has_keys is None else jnp.where(has_keys[..., None], output, 0)


def _library_arguments(options: Options, inputs: Inputs, even: bool) -> tuple[float, Any]:
    """What the library reads: all numbers are finite, and every query sees some key.

    Batch axes have size 1 where all examples share keys and values, or have the same padding.

    Returns:
        the scale of the logits, and ((queries [*B, T, F], keys [*A, S, F], values [*A, S, Dv]),
        whether a query has keys, bool [*B, T], and key lengths, int32 [*C]; None without padding).
    """
    lengths, batch_ndim = (inputs.query.shape[-2], inputs.key.shape[-2]), inputs.query.ndim - 2
    score: Any
    score, scale = options.score, 1.0
    if type(score) is ScaledDot and (factor := score.scale_or(inputs.query.shape[-1] ** -0.5)) > 0:
        # The library multiplies at no cost; the score would read and write all queries for it.
        score, scale = Dot(), factor
        options = dataclasses.replace(options, score=score)

    def of_example(inputs: Inputs) -> Any:
        operands, windows = preparation.project_seen(options, inputs, lengths)
        features = operands[:3]
        if windows is None or not bounds_of(inputs.mask).padded:
            return features, None, None
        # An example without keys has one stand-in key.
        return features, windows.end > windows.first, jnp.maximum(jnp.max(windows.end), 1)

    ndims = core_ndims(options, inputs)
    first = jax.tree.map(lambda leaf, ndim: leaf[(0,) * (leaf.ndim - ndim)], inputs, ndims)

    def over_batch(part: Any, inputs: Inputs) -> Any:
        """A part of the results, over the batch axes of all these arrays."""
        leaves = zip(jax.tree.leaves(inputs), jax.tree.leaves(ndims), strict=True)
        sizes = [leaf.shape[: leaf.ndim - ndim] for leaf, ndim in leaves]
        batch = jnp.broadcast_shapes((1,) * batch_ndim, *sizes)
        return map_over_batch(lambda inputs: part(*of_example(inputs)), batch, (inputs,), (ndims,))

    # Arrays that a part does not read have no batch axes.
    of_keys, of_mask = inputs._replace(query=first.query), first._replace(mask=inputs.mask)
    if isinstance(inputs.key, ProjectedKeys) or score.__class__.project_key is Score.project_key:
        of_keys = of_keys._replace(params=first.params)
    queries, has_keys = over_batch(lambda features, has_keys, _: (features[0], has_keys), inputs)
    keys, values = over_batch(lambda features, *_: features[1:], of_keys)
    key_length = over_batch(lambda *results: results[2], of_mask)
    left, _, padded = bounds_of(inputs.mask)
    if even and lengths[1] % 2 and left is None and not padded:
        key_length = jnp.full([1] * batch_ndim, lengths[1], jnp.int32)
    features, key_length = _batched_alike((queries, keys, values), key_length)
    scale *= score.factor(queries)
    return scale, (features, has_keys, key_length)


def _batched_alike(*trees: Any) -> Any:
    """The arrays as they are; under `jax.vmap` all have the batch axis if one has it.

    JAX's batching rule of cuDNN demands it. Zeros that depend on all arrays are added to each.
    """
    flags = [jnp.isnan(leaf.ravel()[0]) for leaf in jax.tree.leaves(trees) if leaf.size]
    zero: Any = 0 * sum(flag.astype(jnp.int32) for flag in flags)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), trees)


# --- the derivative rule ---


def _twin_of_batch(options: Options, inputs: Inputs) -> Any:
    """The output of `preparation.twin` for the batch."""
    attend = functools.partial(preparation.twin, options)
    return vmap_over_batch(options, attend, inputs)[0]


def _fused_fwd(options: Options, inputs: Inputs) -> tuple[Array, Inputs]:
    # The forward pass of a gradient saves the rows' logsumexp too.
    return jax.vjp(functools.partial(_output, options, even=True), inputs)[0], inputs


def _fused_bwd(options: Options, inputs: Inputs, doutput: Array) -> tuple[Inputs]:
    _, doutput = _batched_alike(inputs, doutput)
    # Within one program XLA merges this forward pass with that of `_fused_fwd`.
    return jax.vjp(functools.partial(_output, options, even=True), inputs)[1](doutput)


_fused = custom_vjp(
    _output, nondiff_argnums=(0,), twin=_twin_of_batch, linear=lambda options, inputs: inputs.value
)
_fused.defvjp(_fused_fwd, _fused_bwd)
