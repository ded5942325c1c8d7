"""`attention` and `attention_weights`: check the arguments, choose an implementation, batch it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats, pad_rank
from attention_jax.core.products import current_backend
from attention_jax.functional.checks import (
    NO_VALUE,
    checked_call,
    checked_implementation,
    hinted,
)
from attention_jax.kernels import IMPLEMENTATIONS, OF_A_BATCH
from attention_jax.kernels.choice import choose
from attention_jax.normalizers import DEFAULT_NORMALIZER, AttentionStatistics, NormalizerLike
from attention_jax.normalizers.contract import BoundNormalizer
from attention_jax.positions.contract import Bias, Mask
from attention_jax.scores import DEFAULT_SCORE, KeyLike, Params, ScoreLike
from attention_jax.tiles import BlockSizes, Inputs, Options
from attention_jax.tiles.options import vmap_over_batch
from attention_jax.whole.reference import logits_mask_and_values

Array = jax.Array


@hinted
def attention(
    query: Array,
    key: KeyLike,
    value: Array,
    *,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    normalizer: NormalizerLike = DEFAULT_NORMALIZER,
    normalizer_params: Params = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    return_statistics: bool = False,
) -> Any:
    """Attention with any score function and any normaliser.

        logits_ij = score(query_i, key_j) + bias_ij
        weights_i = normalizer_j(logits_ij where mask_ij)
        output_i  = sum_j dropout(weights_ij) value_j

    A query whose keys are all masked gets output 0 and sends gradient 0. A key or query that no
    allowed pair contains (padding) may hold anything, NaN included.

    Args:
        query: float [*B, T, Dq]. Heads, if any, are one more batch axis.
        key: float [*B, S, Dk]; batch axes that are missing or of size 1 are shared, not copied. Or
            the `keys` of a `Memory`, which are already projected.
        value: float [*B, S, Dv]; missing batch axes as for `key`.
        score: a name in `SCORES`, "module:Name", a `Score`, or a function `(q, k) -> logits` or
            `(params, q, k) -> logits` of arrays [t, Dq] and [s, Dk] (see `scores.FunctionScore`).
        params: the score's parameters, as its `init` makes them; leaves may have leading axes that
            broadcast to *B. Optional for a score without parameters.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
        bias: a `Bias`, or float broadcastable to [*B, T, S]; added to the logits.
        normalizer: a name in `NORMALIZERS` with or without arguments, as "entmax(alpha=1.5)",
            "module:Name", or a `Normalizer`: what turns a row of logits into weights.
        normalizer_params: the normaliser's parameters, as its `init` makes them; leaves may have
            leading axes that broadcast to *B ([N] for one sink per head). Optional for a
            normaliser without parameters.
        dropout_rate: probability that a weight is dropped, 0 <= rate < 1.
        dropout_rng: one PRNG key, needed when `dropout_rate` > 0; every example drops other
            weights. Or keys with axes that broadcast to *B, where an axis of size 1 drops the same
            weights in all its examples.
        implementation: how to compute it; the result is the same.
            "reference" materialises [T, S].
            "tiled" has memory linear in T and S for any score, and is the fastest for long
            sequences. "cudnn" is cuDNN's attention on NVIDIA GPUs, for scores that are a dot
            product of features. "mosaic_tpu" is a Pallas kernel for TPUs, for every score that
            Mosaic can lower. "mosaic_gpu" is one for NVIDIA GPUs of the Hopper generation, for
            additive attention. All have every derivative, in forward and reverse mode and of any
            order, and `jax.linear_transpose` in the values. None chooses by size, score and backend
            (`kernels/choice.py`), and never one of the two Mosaic kernels, whose speed on a device
            is unknown.
        block_sizes: tile sizes for "tiled" and "mosaic_tpu"; None chooses them.
        return_statistics: also return each row's logsumexp, entropy (nats) and largest logit, of
            softmax with or without a sink.

    Returns:
        output [*B, T, Dv] in the query's dtype; or (output, `AttentionStatistics`), the statistics
        [*B, T] in float32, or float64 if any input is. Weights and sums use that dtype too; arrays
        in bfloat16 or float16 are multiplied in their own dtype.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure. Statistics are requested of
            a normaliser without a logsumexp.
        NotImplementedError: the named implementation cannot compute this.

    >>> import jax.numpy as jnp
    >>> from attention_jax import causal_mask
    >>> query, key, value = jnp.ones((1, 2)), jnp.ones((3, 2)), jnp.array([[1.0], [2.0], [6.0]])
    >>> attention(query, key, value)
    Array([[3.]], dtype=float32)
    >>> attention(query, key, value, mask=causal_mask(offset=1))
    Array([[1.5]], dtype=float32)
    >>> attention(query, key, value, normalizer="softmax(sink=True)",
    ...           normalizer_params={"sink": jnp.log(3.0) + 2**0.5}).round(4)
    Array([[1.5]], dtype=float32)

    Source: Bahdanau et al. 2014, Luong et al. 2015, Vaswani et al. 2017 (their Q, K, V).
    """
    options, inputs = checked_call(
        query,
        key,
        value,
        score=score,
        params=params,
        mask=mask,
        bias=bias,
        normalizer=normalizer,
        normalizer_params=normalizer_params,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        block_sizes=block_sizes,
        return_statistics=return_statistics,
    )
    return attention_of(options, inputs, implementation)


def attention_of(options: Options, inputs: Inputs, implementation: str | None = None) -> Any:
    """The output of `attention`; or (output, statistics) if they are requested."""
    implementation = checked_implementation(implementation)
    capture = capturing.value
    compute = compute_attention if capture is None else capture.compute_attention
    output, statistics = compute(options, inputs, implementation)
    return (output, statistics) if options.return_statistics else output


# `analysis.capture` holds a `CapturePoint` in it while it traces a function. JAX includes it in the
# cache key of compiled functions: those that were compiled without capture points are traced again.
capturing: Any = jax.make_user_context(default_value=None)


def compute_attention(
    options: Options, inputs: Inputs, implementation: str | None = None
) -> tuple[Array, AttentionStatistics | None]:
    """(output [*B, T, Dv], statistics [*B, T] or None) by the implementation that is chosen."""
    return _attention(*choose(implementation, options, inputs, current_backend()), inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attention(implementation: str, options: Options, inputs: Inputs):
    attend = functools.partial(IMPLEMENTATIONS[implementation], options)
    whole = implementation in OF_A_BATCH
    return vmap_over_batch(options, attend, inputs, by_query=True, whole=whole)


# --- the weights alone ---


@hinted
def attention_weights(
    query: Array,
    key: KeyLike,
    *,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    normalizer: NormalizerLike = DEFAULT_NORMALIZER,
    normalizer_params: Params = None,
) -> Array:
    """The weights of `attention`, materialised.

        weights_i = normalizer_j(score(query_i, key_j) + bias_ij where mask_ij)

    Args:
        query, key, score, params, mask, bias, normalizer, normalizer_params: as in `attention`.

    Returns:
        weights [*B, T, S] in the query's dtype. Each row of softmax sums to 1 (to less than 1 with
        a sink), or is 0 if it is fully masked.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> import jax.numpy as jnp
    >>> attention_weights(jnp.ones((1, 2)), jnp.ones((4, 2)))
    Array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    pairs = {"score": score, "params": params, "mask": mask, "bias": bias}
    options, inputs = checked_call(
        query, key, NO_VALUE, **pairs, normalizer=normalizer, normalizer_params=normalizer_params
    )
    return weights_of(options, inputs)


@functools.partial(jax.jit, static_argnums=0)
def weights_of(options: Options, inputs: Inputs) -> Array:
    """Weights [*B, T, S] in the query's dtype, before dropout, with the damping."""
    weights = logits_and_weights(options, inputs)[1]
    if inputs.damping is not None:
        damping = cast_floats(inputs.damping, weights.dtype).materialize(*weights.shape[-2:])
        weights = weights * jnp.exp(pad_rank(damping, weights.ndim))
    return weights.astype(inputs.query.dtype)


@functools.partial(jax.jit, static_argnums=0)
def logits_and_weights(options: Options, inputs: Inputs) -> tuple[Array, Array]:
    """Logits and weights, [*B, T, S] each, in the compute dtype.

    The logits are transformed by the normaliser, and -inf where masked.
    """
    normalizer = options.normalizer

    def one_example(inputs: Inputs) -> tuple[Array, Array]:
        logits, mask, _ = logits_mask_and_values(options, inputs)
        params = cast_floats(inputs.normalizer_params, inputs.compute_dtype)
        weights = normalizer(params, logits, mask)
        return BoundNormalizer(normalizer, params).transform_rows(logits, mask), weights

    return vmap_over_batch(options, one_example, inputs, by_query=True)
