"""The reference implementation, which materialises [T, S] and is differentiated by JAX.

With the score e and the mask m,

    L = e(Q, K) + bias,    A = normalizer(L, m),    O = dropout(A) V.

Plain differentiation then gives, for a cotangent dO (softmax, and without dropout),

    dV = A^T dO,    dA = dO V^T,    dL_ij = A_ij (dA_ij - sum_k A_ik dA_ik),

and dQ, dK and the gradients of the score's parameters from dL through e.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.core.products import weighted_sum
from attention_jax.normalizers import AttentionStatistics
from attention_jax.normalizers.contract import BoundNormalizer
from attention_jax.normalizers.softmax_rows import summary_of_rows
from attention_jax.positions import dropout
from attention_jax.tiles.features import pair_logits, project_tokens, stand_in_features
from attention_jax.tiles.options import Inputs, Options, results_of_rows

Array = jax.Array


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in the compute dtype."""
    logits, mask, values = logits_mask_and_values(options, inputs)
    params = cast_floats(inputs.normalizer_params, inputs.compute_dtype)
    bound = BoundNormalizer(options.normalizer, params)
    logits = bound.transform_rows(logits, mask)
    weights = bound.weights_of_rows(logits)
    # Whether any weight is not 0, NaN included; `any(weights != 0)` would store a second [T, S].
    any_allowed = jnp.max(jax.lax.stop_gradient(weights), axis=1, initial=0) != 0
    if options.dropout_rate > 0:
        positions = (jnp.arange(length) for length in logits.shape)
        keep = dropout.keep_mask(inputs.dropout_rng, options.dropout_rate, *positions)
        weights = dropout.drop(weights, keep, options.dropout_rate)
    if inputs.damping is not None:
        damping = cast_floats(inputs.damping, inputs.compute_dtype)
        weights = weights * jnp.exp(damping.materialize(*logits.shape))
    output = weighted_sum(weights, values)
    # A NaN value that another query may see reaches a query without keys as 0 * NaN.
    output = jnp.where(any_allowed[:, None], output, 0)
    summary = summary_of_rows(logits) if options.normalizer.is_softmax else None
    return results_of_rows(options, inputs, output, summary)


def logits_mask_and_values(options: Options, inputs: Inputs) -> tuple[Array, Array | None, Array]:
    """Logits [T, S] in the compute dtype, with arbitrary masked entries; mask [T, S]; values."""
    score, dtype = options.score, inputs.compute_dtype
    shape = (inputs.query.shape[0], inputs.key.shape[0])
    mask, replacements = None, None
    used: Any = (None, None)
    if inputs.mask is not None:
        mask = inputs.mask.materialize(*shape)
        replacements = stand_in_features(score, inputs)
        # A weight of 0 does not keep out a NaN (0 * NaN is NaN), neither forward nor backward.
        used = mask.any(1), mask.any(0)
    queries, keys, values, params = project_tokens(score, inputs, shape, used)
    logits = pair_logits(score, params, queries, keys, mask, replacements).astype(dtype)
    if inputs.bias is not None:
        logits = logits + cast_floats(inputs.bias, dtype).materialize(*shape).astype(dtype)
    return logits, mask, values
