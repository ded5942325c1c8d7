"""Attention rollout: the share of each input token in each position, layer by layer.

From the second layer on, a layer's weights refer to positions that are already mixtures of input
tokens. Rollout follows these mixtures back to the input tokens.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, float_array
from attention_jax.core.checks import check_choice, checked_fraction
from attention_jax.functional.checks import check_axes

Array = jax.Array
HeadReduction = Literal["mean", "max"]


def attention_rollout(
    weights: Array | Sequence[Array],
    *,
    residual: float = 0.5,
    head_reduction: str = "mean",
    return_layers: bool = False,
) -> Array:
    """The share of each input token in each position, after each self attention layer.

        A_l = normalized((1 - residual) heads(weights_l) + residual I)
        rollout_l = A_l rollout_{l-1},    rollout_0 = I

    where `normalized` divides each row by its sum. Rows sum to 1. A position that attends to no key
    (a row of zeros) keeps its mixture through its residual; with `residual=0` its row is 0.

    Args:
        weights: float [L, *B, N, T, T], the first layer first, or a sequence of L arrays
            [*B, N, T, T]; N heads, rows sum to 1 over the last axis (or are 0). The head axis is
            required, because [B, T, T] looks like B heads: give weights without heads, as
            `attention_weights` returns them, as `weights[..., None, :, :]`.
        residual: the share of a position's own mixture that its residual connection keeps,
            0 <= residual < 1; 0 for a model without residual connections.
        head_reduction: "mean" over the heads (the paper's), or "max" over the heads, with each row
            divided by its sum.
        return_layers: return the rollout after each layer instead of only after the last.

    Returns:
        rollout [*B, T, T], or [L, *B, T, T], in float32 (float64 if the weights are): row i has the
        share of each input token in position i.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value; a row of weights whose values
            are known (not traced) does not sum to 1 within 1 %, as with a Gaussian or a sigmoid.

    >>> first, second = jnp.array([[[1.0, 0.0], [1.0, 0.0]]]), jnp.array([[[0.0, 1.0], [0.0, 1.0]]])
    >>> attention_rollout([first, second])  # half of position 1 was token 0 after the first layer
    Array([[0.75, 0.25],
           [0.5 , 0.5 ]], dtype=float32)

    Source: Abnar and Zuidema 2020, section 3, "Attention rollout", equation 1: their W_att is
    heads(weights), their A = 0.5 W_att + 0.5 I, their A-tilde is rollout.
    """
    weights = float_array("weights", weights)
    *_, num_heads, target_length, source_length = (1, 1, 1, *weights.shape)
    if weights.ndim < 4 or target_length != source_length or 0 in (weights.shape[0], num_heads):
        raise ValueError(
            "weights must be [L, *B, N, T, T], or a sequence of [*B, N, T, T], with at least one"
            f" layer and one head; got {list(weights.shape)}"
        )
    _check_shares("weights", weights)
    check_choice("head_reduction", head_reduction, HeadReduction)
    rollouts = _rollouts(weights, checked_fraction("residual", residual), head_reduction)
    return rollouts if return_layers else rollouts[-1]


def cross_rollout(
    cross_weights: Array, encoder_rollout: Array, *, head_reduction: str = "mean"
) -> Array:
    """The share of each source token in each target position, after a cross attention.

        rollout = heads(cross_weights) encoder_rollout

    Rows sum to 1; the row of a position that attends to no key is 0.

    Args:
        cross_weights: float [*B, N, T, S], from one decoder layer; N heads. Give weights averaged
            over heads, as `nn.Model` returns them, as `weights[:, None]`.
        encoder_rollout: float [*B, S, S], the `attention_rollout` of the encoder.
        head_reduction: "mean" over the heads, or "max" with each row divided by its sum.

    Returns:
        rollout [*B, T, S] in float32, or float64 if any input is.

    Raises:
        ValueError: as in `attention_rollout`.

    >>> cross_weights = jnp.array([[[0.0, 1.0]]])  # one target, which looks at memory 1 ...
    >>> cross_rollout(cross_weights, jnp.array([[1.0, 0.0], [0.25, 0.75]]))  # ... 1/4 of token 0
    Array([[0.25, 0.75]], dtype=float32)

    Source: ours; it applies a decoder's weights to A-tilde of Abnar and Zuidema 2020, section 3.
    """
    check_choice("head_reduction", head_reduction, HeadReduction)
    cross_weights = float_array("cross_weights", cross_weights)
    encoder_rollout = float_array("encoder_rollout", encoder_rollout)
    if cross_weights.ndim < 3 or cross_weights.shape[-3] == 0:
        raise ValueError(
            "cross_weights must be [*B, N, T, S] with at least one head; got"
            f" {list(cross_weights.shape)}"
        )
    _check_shares("cross_weights", cross_weights)
    *batch, _, _, source_length = cross_weights.shape
    core = (source_length, source_length)
    check_axes("encoder_rollout", encoder_rollout, core, tuple(batch), " to match cross_weights")
    dtype = accumulator_dtype(cross_weights, encoder_rollout)
    weights = _reduced_heads(cross_weights.astype(dtype), head_reduction)
    return jnp.matmul(weights, encoder_rollout.astype(dtype), precision="highest")


def wrong_sums(weights: Array) -> np.ndarray:
    """The sums of rows that are neither 0 nor 1 within 1 %; no sums of a traced array."""
    if isinstance(weights, jax.core.Tracer) or not weights.is_fully_addressable:
        return np.zeros(0)
    sums = np.asarray(jnp.sum(weights, axis=-1, dtype=accumulator_dtype(weights)))
    return sums[(abs(sums - 1) > 0.01) & (sums != 0)]


def _check_shares(name: str, weights: Array) -> None:
    if (sums := wrong_sums(weights)).size:
        raise ValueError(
            f"{name} must have rows that sum to 1, or are 0; got the sum {sums[0]:.4g}"
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rollouts(weights: Array, residual: float, head_reduction: str) -> Array:
    """[L, *B, N, T, T] -> [L, *B, T, T]"""
    weights = _reduced_heads(weights.astype(accumulator_dtype(weights)), head_reduction)
    eye = jnp.broadcast_to(jnp.eye(weights.shape[-1], dtype=weights.dtype), weights.shape)
    mixtures = _normalized((1 - residual) * weights + residual * eye)

    def step(rollout: Array, mixture: Array) -> tuple[Array, Array]:
        rollout = jnp.matmul(mixture, rollout, precision="highest")
        return rollout, rollout

    return jax.lax.scan(step, eye[0], mixtures)[1]


def _reduced_heads(weights: Array, reduction: str) -> Array:
    """[*B, N, T, S] -> [*B, T, S]"""
    if reduction == "mean":
        return jnp.mean(weights, axis=-3)
    # The maxima over different heads can sum to more than 1, and would outweigh the residual.
    return _normalized(jnp.max(weights, axis=-3))


def _normalized(rows: Array) -> Array:
    sums = jnp.sum(rows, axis=-1, keepdims=True)
    return rows / jnp.where(sums == 0, 1, sums)  # a row of zeros stays 0
