"""Monotonic attention: each query attends to one key, no earlier than the previous query's key.

A score gives the choosing probabilities; `monotonic_walks` turns them into weights.
"""

import functools
import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attention_jax.core.checks import checked_rng
from attention_jax.functional.attention import capturing
from attention_jax.functional.checks import checked_call, checked_floats, hinted
from attention_jax.functional.monotonic_walks import (
    checked_initial,
    expected_weights,
    hard_monotonic_weights,
)
from attention_jax.positions.contract import Bias, Mask
from attention_jax.scores import DEFAULT_SCORE, Params, ScoreLike
from attention_jax.tiles import Inputs, Options
from attention_jax.tiles.options import vmap_over_batch
from attention_jax.whole.query_chunks import Chunk, allowed_only, attend_in_order

Array = jax.Array


@hinted
def monotonic_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    offset: Array | float = 0.0,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    noise_rng: Array | None = None,
    noise_scale: Array | float = 1.0,
    hard: bool = False,
    initial: Array | None = None,
    return_weights: bool | Literal["last"] = True,
) -> Any:
    """Monotonic attention with any score function.

        p_ij      = sigmoid(score(query_i, key_j) + bias_ij + offset + noise_ij),  0 where masked
        weights   = monotonic_weights(p),  or hard_monotonic_weights(p)
        output_i  = sum_j weights_ij value_j

    The queries are computed in order, in chunks of 64, or of sqrt(T) if that is more. The gradient
    saves S floats per chunk and recomputes each chunk, so that only the weights of all queries, if
    they are returned, take memory T S.

    A query whose keys are all masked gets output 0 and weights 0, and sends gradient 0 for any
    cotangent, NaN included. Its walk stops at no key, so later queries get 0 too: mask padded
    queries only at the end of a sequence. (Those later queries have keys, so a NaN cotangent of
    theirs gives NaN gradients.) A key or query that no allowed pair contains may hold anything, NaN
    included.

    Args:
        query, key, value, score, params, mask, bias: as in `attention`; the key is an array.
        offset: float broadcastable to *B (for instance one per head), added to the logits;
            differentiable. A walk of constant p = sigmoid(offset) passes exp(-offset) keys per
            query.
        noise_rng: one PRNG key for normal noise on the logits during training. The noise makes the
            model learn large logits, whose p are nearly 0 or 1, as the hard form assumes. None for
            no noise.
        noise_scale: standard deviation of the noise, a scalar or float broadcastable to *B.
        hard: whether to use the hard form, for decoding. Its only gradient is that of `value`.
        initial: float broadcastable to [*B, S], the weights of the query before the first, to
            decode step by step; None for all the weight on the first key. The hard form starts at
            the first positive entry, and attends to nothing if no entry is positive.
        return_weights: True for the weights of all queries; "last" for those of the last query,
            which a later call takes as `initial`; False for the output alone.

    Returns:
        (output [*B, T, Dv], weights [*B, T, S]) in the query's dtype, computed in float32 (float64
        if any input is). Rows of weights sum to at most 1. With "last", (output, weights [*B, S] in
        the compute dtype); with False, the output alone.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> query, key, value = jnp.ones((2, 1)), jnp.zeros((3, 1)), jnp.array([[1.0], [2.0], [4.0]])
    >>> output, weights = monotonic_attention(query, key, value, score="dot")
    >>> weights.tolist()
    [[0.5, 0.25, 0.125], [0.25, 0.25, 0.1875]]
    >>> output.tolist()
    [[1.5], [1.5]]

    Source: Raffel et al. 2017, section 2.2 to 2.4 (their a(s, h) is our score, r our offset). They
        normalise additive attention's v; here the score is unchanged.
    """
    pairs = {"score": score, "params": params, "mask": mask, "bias": bias}
    options, inputs = checked_call(query, key, value, **pairs)
    if noise_rng is not None:
        # It is split over the batch.
        inputs = inputs._replace(dropout_rng=checked_rng(noise_rng, name="noise_rng"))
    batch_shape, source_length = inputs.query.shape[:-2], inputs.key.shape[-2]
    offset = _number_of_batch("offset", offset, batch_shape)
    noise_scale = _number_of_batch("noise_scale", noise_scale, batch_shape)
    initial = checked_initial(initial, batch_shape, source_length)
    if not isinstance(hard, bool):
        raise ValueError(f"hard must be True or False; got {hard!r}")
    if not isinstance(return_weights, bool) and return_weights != "last":
        raise ValueError(f"return_weights must be True, False or 'last'; got {return_weights!r}")
    capture = capturing.value
    all_weights = return_weights is True or (capture is not None and capture.matrices)
    output, last, weights = _monotonic_attention(
        options, hard, all_weights, inputs, offset, noise_scale, initial
    )
    if capture is not None:
        output = capture.point(inputs, output, weights=weights)
    if return_weights == "last":
        return output, last
    return (output, weights) if return_weights else output


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _monotonic_attention(
    options: Options,
    hard: bool,
    all_weights: bool,
    inputs: Inputs,
    offset: Array,
    noise_scale: Array,
    initial: Array,
) -> tuple[Array, Array, Array | None]:
    """(output [*B, T, Dv], weights [*B, S] of the last query, weights [*B, T, S] or None)."""

    def one_example(inputs: Inputs, offset: Array, noise_scale: Array, initial: Array) -> Any:
        dtype, target_length = inputs.compute_dtype, inputs.query.shape[0]

        def compute_weights(chunk: Chunk, previous: Array) -> tuple[Array, Array, None]:
            allowed = chunk.allowed
            logits = chunk.logits() + offset.astype(dtype)
            if inputs.dropout_rng is not None:
                # The noise of a query depends on its position, not on its chunk.
                rngs = jax.vmap(jax.random.fold_in, (None, 0))(inputs.dropout_rng, chunk.positions)
                draw = functools.partial(jax.random.normal, shape=logits.shape[1:], dtype=dtype)
                logits = logits + noise_scale.astype(dtype) * jax.vmap(draw)(rngs)
            # Mask before the sigmoid too: its slope at a NaN logit would give NaN gradients.
            probabilities = allowed_only(allowed, jax.nn.sigmoid(allowed_only(allowed, logits)))
            if hard:
                length = previous.size
                keys = jnp.where(previous > 0, jnp.arange(length), length)
                start = jnp.min(keys, initial=length)  # no key if all weights are 0
                weights = hard_monotonic_weights(probabilities, start)
                weights = jnp.where(jnp.isnan(previous).any(), jnp.nan, weights)
            else:
                weights = expected_weights(probabilities, previous)
            weights = allowed_only(allowed, weights)
            # The last chunk may end with padding.
            end = jnp.minimum(target_length - 1 - chunk.positions[0], chunk.positions.size - 1)
            last = jax.lax.dynamic_index_in_dim(weights, end, keepdims=False)
            return last, weights, None

        output, weights, _, last = attend_in_order(
            options.score,
            inputs,
            compute_weights,
            initial.astype(dtype),
            return_weights=all_weights,
        )
        return output, last, weights

    numbers = (offset, 0), (noise_scale, 0), (initial, 1)
    return vmap_over_batch(options, one_example, inputs, *numbers)


def _number_of_batch(name: str, number: Any, batch_shape: tuple[int, ...]) -> Array:
    """A float array that broadcasts to *B; ValueError if it does not."""
    number = float(number) if isinstance(number, numbers.Integral) else number
    return checked_floats(name, number, (), batch_shape)
