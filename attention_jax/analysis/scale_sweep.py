"""The effect of the logits' scale on attention: entropy, softmax Jacobian, and gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.analysis.gradients import checked_doutput, gradient_of_weights
from attention_jax.analysis.softmax_gradients import softmax_jacobian_norm, softmax_vjp
from attention_jax.core.arrays import float_array
from attention_jax.functional.checks import checked_call
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.reference import logits_and_mask
from attention_jax.implementations.softmax import masked_softmax
from attention_jax.normalizers.rows import summary_of_rows
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Params, Score

Array = jax.Array


class ScaleSweep(NamedTuple):
    """Means over the rows of all examples that have a key, for each scale."""

    scales: Array  # [n]  those of the call
    gradient_norm: Array  # [n]  mean_i |dlogits_i|, for the logits after scaling
    entropy: Array  # [n]  mean_i of the weights' entropy, in nats
    jacobian_norm: Array  # [n]  mean_i |d weights_i / d logits_i|_F


def logit_scale_sweep(
    query: Array,
    key: Array,
    value: Array,
    doutput: Array,
    scales: Array,
    *,
    score: str | Score = "scaled",
    params: Params = None,
    mask: Mask | Array | None = None,
) -> ScaleSweep:
    """The gradient, entropy and softmax Jacobian of attention, as functions of the logits' scale.

        weights(c) = softmax(c logits),    dlogits(c) = the gradient of c logits for this doutput

    The score is computed once for all scales, and compiled once. The gradient of the unscaled
    logits is c times as large. All scales are in memory at once: several arrays [n, T, S] per
    example.

    With `value` the identity [S, S] and `doutput` 1 at each row's largest logit, the gradient is
    the gradient of the largest weight.

    Args:
        query, key, value, doutput, score, params, mask: as in `attention_gradients`.
        scales: float [n], finite.

    Returns:
        `ScaleSweep` in float32, or float64 if any of query, key, value and params is. The means
        are 0 if no row has a key.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> query, key, value = jnp.ones((1, 1)), jnp.array([[0.0], [1.0]]), jnp.eye(2)
    >>> sweep = logit_scale_sweep(query, key, value, jnp.array([[0.0, 1.0]]), jnp.array([0.0, 9.0]))
    >>> sweep.entropy.round(3).tolist(), sweep.jacobian_norm.round(3).tolist()
    ([0.6930000185966492, 0.0010000000474974513], [0.5, 0.0])

    Source: "Attention Variants", §38.4, the gradient of the largest weight over the score's scale.
    """
    call = checked_call(query, key, value, score=score, params=params, mask=mask)
    score, inputs = call.options.score, call.inputs
    doutput = checked_doutput(inputs, doutput)
    scales = float_array("scales", scales)
    if scales.ndim != 1:
        raise ValueError(f"scales must be [n]; got {list(scales.shape)}")
    return _sweep(score, inputs, doutput, scales)


@functools.partial(jax.jit, static_argnums=0)
def _sweep(score: Score, inputs: Inputs, doutput: Array, scales: Array) -> ScaleSweep:
    one_example = functools.partial(_one_example, Options(score, BlockSizes()))
    sums, rows = vmap_over_batch(score, one_example, inputs, (doutput, 2), (scales, 1))
    batch = tuple(range(inputs.query.ndim - 2))
    count = jnp.maximum(jnp.sum(rows), 1)
    means = [jnp.sum(example_sums, axis=batch) / count for example_sums in sums]
    return ScaleSweep(scales.astype(means[0].dtype), *means)


def _one_example(
    options: Options, inputs: Inputs, doutput: Array, scales: Array
) -> tuple[tuple[Array, Array, Array], Array]:
    """(three sums over rows [n], the number of rows that have a key)."""
    logits, mask = logits_and_mask(options, inputs)
    dweights = gradient_of_weights(inputs.value, mask, doutput, inputs.compute_dtype)

    def at_scale(scale: Array) -> tuple[Any, ...]:
        scaled = logits * scale
        if mask is not None:
            scaled = jnp.where(mask, scaled, -jnp.inf)
        weights = masked_softmax(scaled)
        dlogits = softmax_vjp(weights, dweights)
        per_row = (
            jnp.sqrt(jnp.sum(dlogits * dlogits, axis=-1)),
            summary_of_rows(scaled).statistics().entropy,
            softmax_jacobian_norm(weights),
        )
        return tuple(jnp.sum(numbers) for numbers in per_row)  # rows without a key have 0

    target_length, source_length = logits.shape
    has_key = jnp.full(target_length, source_length > 0) if mask is None else mask.any(axis=1)
    return jax.vmap(at_scale)(scales.astype(logits.dtype)), jnp.sum(has_key, dtype=logits.dtype)
