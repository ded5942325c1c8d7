"""Attention rollout: the share of each input token in each position, layer by layer.

From the second layer on, a layer's weights refer to positions that are already mixtures of input
tokens. Rollout follows these mixtures back to the input tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, float_array
from attention_jax.core.checks import checked_fraction
from attention_jax.functional.checks import check_axes

Array = jax.Array


def attention_rollout(
    weights: Array | Sequence[Array],
    *,
    residual: float = 0.5,
    return_layers: bool = False,
) -> Array:
    """The share of each input token in each position, after each self attention layer.

        A_l = normalized((1 - residual) mean(weights_l) + residual I)
        rollout_l = A_l rollout_{l-1},    rollout_0 = I

    where `mean` is over heads and `normalized` divides each row by its sum. Rows sum to 1. A
    position that attends to no key (a row of zeros) keeps its mixture through its residual; with
    `residual=0` its row is 0.

    Args:
        weights: float [L, *B, N, T, T], the first layer first, or a sequence of L arrays
            [*B, N, T, T]; N heads, rows sum to 1 over the last axis (or are 0). The head axis is
            required: give heads that are reduced already, by their mean or in another way, as
            `weights[..., None, :, :]`.
        residual: the share of a position's own mixture that its residual connection keeps,
            0 <= residual < 1; 0 for a model without residual connections.
        return_layers: return the rollout after each layer instead of only after the last.

    Returns:
        rollout [*B, T, T], or [L, *B, T, T], in float32 (float64 if the weights are): row i has the
        share of each input token in position i.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> first, second = jnp.array([[[1.0, 0.0], [1.0, 0.0]]]), jnp.array([[[0.0, 1.0], [0.0, 1.0]]])
    >>> attention_rollout([first, second])  # half of position 1 was token 0 after the first layer
    Array([[0.75, 0.25],
           [0.5 , 0.5 ]], dtype=float32)

    Source: Abnar and Zuidema 2020, section 3, "Attention rollout", equation 1: their W_att is
    mean(weights), their A = 0.5 W_att + 0.5 I, their A-tilde is rollout.
    """
    weights = float_array("weights", weights)
    *_, num_heads, target_length, source_length = (1, 1, 1, *weights.shape)
    if weights.ndim < 4 or target_length != source_length or 0 in (weights.shape[0], num_heads):
        raise ValueError(
            "weights must be [L, *B, N, T, T], or a sequence of [*B, N, T, T], with at least one"
            f" layer and one head; got {list(weights.shape)}"
        )
    rollouts = _rollouts(weights, checked_fraction("residual", residual))
    return rollouts if return_layers else rollouts[-1]


def cross_rollout(cross_weights: Array, encoder_rollout: Array) -> Array:
    """The share of each source token in each target position, after a cross attention.

        rollout = mean(cross_weights) encoder_rollout

    Rows sum to 1; the row of a position that attends to no key is 0.

    Args:
        cross_weights: float [*B, N, T, S], from one decoder layer; N heads. Give weights averaged
            over heads, as `nn.Model` returns them, as `weights[:, None]`.
        encoder_rollout: float [*B, S, S], the `attention_rollout` of the encoder.

    Returns:
        rollout [*B, T, S] in float32, or float64 if any input is.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> cross_weights = jnp.array([[[0.0, 1.0]]])  # one target, which looks at memory 1 ...
    >>> cross_rollout(cross_weights, jnp.array([[1.0, 0.0], [0.25, 0.75]]))  # ... 1/4 of token 0
    Array([[0.25, 0.75]], dtype=float32)

    Source: ours; it applies a decoder's weights to A-tilde of Abnar and Zuidema 2020, section 3.
    """
    cross_weights = float_array("cross_weights", cross_weights)
    encoder_rollout = float_array("encoder_rollout", encoder_rollout)
    if cross_weights.ndim < 3 or cross_weights.shape[-3] == 0:
        raise ValueError(
            "cross_weights must be [*B, N, T, S] with at least one head; got"
            f" {list(cross_weights.shape)}"
        )
    *batch, _, _, source_length = cross_weights.shape
    core = (source_length, source_length)
    check_axes("encoder_rollout", encoder_rollout, core, tuple(batch), " to match cross_weights")
    dtype = accumulator_dtype(cross_weights, encoder_rollout)
    weights = jnp.mean(cross_weights.astype(dtype), axis=-3)
    return jnp.matmul(weights, encoder_rollout.astype(dtype), precision="highest")


@functools.partial(jax.jit, static_argnums=1)
def _rollouts(weights: Array, residual: float) -> Array:
    """[L, *B, N, T, T] -> [L, *B, T, T]"""
    weights = jnp.mean(weights.astype(accumulator_dtype(weights)), axis=-3)
    eye = jnp.broadcast_to(jnp.eye(weights.shape[-1], dtype=weights.dtype), weights.shape)
    rows = (1 - residual) * weights + residual * eye
    sums = jnp.sum(rows, axis=-1, keepdims=True)
    mixtures = rows / jnp.where(sums == 0, 1, sums)  # a row of zeros stays 0

    def step(rollout: Array, mixture: Array) -> tuple[Array, Array]:
        rollout = jnp.matmul(mixture, rollout, precision="highest")
        return rollout, rollout

    return jax.lax.scan(step, eye[0], mixtures)[1]
