"""`attention` and `attention_weights`: check the arguments, choose an implementation, batch it."""

from __future__ import annotations

import functools
from typing import Literal, overload

import jax
import jax.numpy as jnp

from attention_jax.core.backend import current_backend
from attention_jax.functional.capture_point import (
    CapturedAttention,
    CaptureOptions,
    capture_point,
    captured_call,
    capturing,
)
from attention_jax.functional.checks import (
    check_block_sizes,
    check_statistics,
    checked_dropout,
    checked_implementation,
    checked_inputs,
)
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.reference import logits_and_mask, params_of_normalizer
from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.kernels.choice import choose
from attention_jax.normalizers import (
    DEFAULT_NORMALIZER,
    AttentionStatistics,
    Normalizer,
    NormalizerLike,
    get_normalizer,
)
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import (
    DEFAULT_SCORE,
    KeyLike,
    Params,
    ProjectedKeys,
    Score,
    ScoreLike,
    get_score,
)

Array = jax.Array


@overload
def attention(
    query: Array,
    key: KeyLike,
    value: Array,
    *,
    score: ScoreLike = ...,
    params: Params = ...,
    mask: Mask | Array | None = ...,
    bias: Bias | Array | None = ...,
    normalizer: NormalizerLike = ...,
    normalizer_params: Params = ...,
    dropout_rate: float = ...,
    dropout_rng: Array | None = ...,
    implementation: str | None = ...,
    block_sizes: BlockSizes | None = ...,
    return_statistics: Literal[False] = ...,
) -> Array: ...
@overload
def attention(
    query: Array,
    key: KeyLike,
    value: Array,
    *,
    score: ScoreLike = ...,
    params: Params = ...,
    mask: Mask | Array | None = ...,
    bias: Bias | Array | None = ...,
    normalizer: NormalizerLike = ...,
    normalizer_params: Params = ...,
    dropout_rate: float = ...,
    dropout_rng: Array | None = ...,
    implementation: str | None = ...,
    block_sizes: BlockSizes | None = ...,
    return_statistics: Literal[True],
) -> tuple[Array, AttentionStatistics]: ...
def attention(
    query,
    key,
    value,
    *,
    score=DEFAULT_SCORE,
    params=None,
    mask=None,
    bias=None,
    normalizer=DEFAULT_NORMALIZER,
    normalizer_params=None,
    dropout_rate=0.0,
    dropout_rng=None,
    implementation=None,
    block_sizes=None,
    return_statistics=False,
):
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
        dropout_rng: one PRNG key, needed when `dropout_rate` > 0.
        implementation: how to compute it; the result is the same.
            "reference" materialises [T, S].
            "tiled" has memory linear in T and S for any score, and is the fastest for long
            sequences. "cudnn" is cuDNN's attention on NVIDIA GPUs, for scores that are a dot
            product of features. "mosaic_tpu" is a Pallas kernel for TPUs, for every score that
            Mosaic can lower. "mosaic_gpu" is one for NVIDIA GPUs of the Hopper generation, for
            additive attention. All have every derivative, in forward and reverse mode and of any
            order. None chooses by size, score and backend (`kernels/choice.py`), and
            never one of these two kernels, which were not run on a device yet.
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
    return damped_attention(
        query,
        key,
        value,
        score=score,
        params=params,
        mask=mask,
        bias=bias,
        damping=None,
        normalizer=normalizer,
        normalizer_params=normalizer_params,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        implementation=implementation,
        block_sizes=block_sizes,
        return_statistics=return_statistics,
    )


def damped_attention(
    query,
    key,
    value,
    *,
    score,
    params,
    mask,
    bias,
    damping: Bias | None,
    normalizer=DEFAULT_NORMALIZER,
    normalizer_params=None,
    dropout_rate,
    dropout_rng,
    implementation,
    block_sizes,
    return_statistics=False,
):
    """`attention` with weights that are multiplied by exp(damping), after the normaliser."""
    score = get_score(score)
    implementation = checked_implementation(implementation)
    check_block_sizes(block_sizes)
    normalizer = get_normalizer(normalizer)
    check_statistics(normalizer, return_statistics)
    dropout_rate, dropout_rng = checked_dropout(dropout_rate, dropout_rng)
    score, normalizer, inputs = checked_inputs(
        score, query, key, value, params, mask, bias, normalizer, normalizer_params
    )
    if damping is not None:
        damping.check(inputs.query.shape[:-2], inputs.query.shape[-2], inputs.key.shape[-2])
    inputs = inputs._replace(dropout_rng=dropout_rng, damping=damping)
    # "cudnn" has none; those that are captured come from another call then.
    captured_statistics = (
        capturing() is not None and normalizer.has_statistics and implementation != "cudnn"
    )
    options = Options(
        score,
        BlockSizes(),
        dropout_rate,
        return_statistics=return_statistics or captured_statistics,
        normalizer=normalizer,
    )
    implementation, options = choose(
        implementation, block_sizes, options, inputs, current_backend()
    )
    output, statistics = _attend(implementation, options, inputs)
    output = capture_point(
        output,
        functools.partial(_captured_with_logits, score, normalizer, inputs, output, statistics),
    )
    return (output, statistics) if return_statistics else output


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
    score = get_score(score)
    value = jnp.zeros((*key.shape[:-1], 1)) if isinstance(key, ProjectedKeys) else key  # unused
    normalizer = get_normalizer(normalizer)
    score, normalizer, inputs = checked_inputs(
        score, query, key, value, params, mask, bias, normalizer, normalizer_params
    )
    return _weights(score, normalizer, inputs)


# --- the compiled functions ---


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(implementation: str, options: Options, inputs: Inputs):
    """(output [*B, T, Dv], statistics [*B, T] or None)."""
    attend = functools.partial(IMPLEMENTATIONS[implementation], options)
    return vmap_over_batch(
        options.score, attend, inputs, by_query=True, normalizer=options.normalizer
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(score: Score, normalizer: Normalizer, inputs: Inputs) -> Array:
    """Weights [*B, T, S] in the query's dtype."""
    return _logits_and_weights(score, normalizer, inputs)[1].astype(inputs.query.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits_and_weights(
    score: Score, normalizer: Normalizer, inputs: Inputs
) -> tuple[Array, Array]:
    """Logits and weights, [*B, T, S] each, in the compute dtype.

    The logits are those that the normaliser has transformed, -inf where masked.
    """

    def one_example(inputs: Inputs) -> tuple[Array, Array]:
        options = Options(score, BlockSizes(), normalizer=normalizer)
        logits, mask = logits_and_mask(options, inputs)
        normalizer_params = params_of_normalizer(inputs)
        logits = normalizer.prepared(normalizer_params, logits, mask)
        return logits, normalizer.weights_of_rows(normalizer_params, logits, mask)

    return vmap_over_batch(score, one_example, inputs, by_query=True, normalizer=normalizer)


def _captured_with_logits(
    score: Score,
    normalizer: Normalizer,
    inputs: Inputs,
    output: Array,
    statistics: AttentionStatistics | None,
    options: CaptureOptions,
) -> CapturedAttention:
    """The arrays of a call for `analysis.capture`, with logits and statistics."""
    logits, weights = None, None
    if options.matrices:
        logits, weights = _logits_and_weights(score, normalizer, inputs)
    if not normalizer.has_statistics:
        logits = None  # gradients and statistics of captured logits are those of a softmax of them
    elif statistics is None:
        wanted = Options(score, BlockSizes(), return_statistics=True, normalizer=normalizer)
        inputs_without_rng = inputs._replace(dropout_rng=None)  # weights before dropout
        chosen = choose(None, None, wanted, inputs_without_rng, current_backend())
        statistics = _attend(*chosen, inputs_without_rng)[1]
    captured = captured_call(inputs, output, weights, options)
    return captured._replace(logits=logits, statistics=statistics)
