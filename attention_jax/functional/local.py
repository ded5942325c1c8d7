"""Local attention: each query attends to a window of keys around its center.

`centers` computes the centers, `windows` the mask and the Gaussian around them.

Source: Luong, Pham and Manning 2015, section 3.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attention_jax.functional.attention import attention_weights, results_of
from attention_jax.functional.checks import checked_inputs
from attention_jax.functional.windows import gaussian_bias, window_mask
from attention_jax.implementations import BlockSizes
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.mask_algebra import Mask, as_mask
from attention_jax.pairwise.position_functions import same_rank
from attention_jax.scores import DEFAULT_SCORE, Params, ScoreLike

Array = jax.Array


def local_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    centers: Array,
    radius: int,
    sigma: float | Array | None = None,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> Array:
    """Attention in a window around a center for each query, with any score.

        w_ij = softmax_j(logits_ij where |j - p_i| <= D) exp(-(j - p_i)^2 / (2 sigma^2))
        output_i = sum_j w_ij value_j

    As in the paper, the Gaussian multiplies the weights after the softmax, so their sum is less
    than 1. The centers p get gradients through the Gaussian, not through the edges of the window.
    With the tiled implementation time and memory are linear in T times the window.

    Args:
        query, key, value, score, params, mask, bias, dropout_rate, dropout_rng, implementation,
            block_sizes: as in `attention`.
        centers: float or int [*B, T], p; see `monotonic_centers`, `reversed_centers`,
            `predicted_centers`. A window that contains no key gives output 0.
        radius: D, at least 0.
        sigma: standard deviation of the Gaussian, in key positions, as in `gaussian_bias`; D / 2 in
            the paper. None for no Gaussian (local-m).

    Returns:
        output [*B, T, Dv] in the query's dtype.

    Raises:
        ValueError: an argument has the wrong shape, dtype or range.

    >>> tokens = jnp.eye(4)
    >>> local_attention(tokens, tokens, tokens, centers=jnp.arange(4), radius=0).tolist()[1]
    [0.0, 1.0, 0.0, 0.0]

    Source: Luong, Pham and Manning 2015, section 3.2, equations 7, 9 and 10.
    """
    mask, gaussian = _window_and_gaussian(centers, radius, sigma, mask)
    call = checked_inputs(score, query, key, value, params, mask, bias, damping=gaussian)
    return results_of(call, dropout_rate, dropout_rng, implementation, block_sizes)[0]


def local_attention_weights(
    query: Array,
    key: Array,
    *,
    centers: Array,
    radius: int,
    sigma: float | Array | None = None,
    score: ScoreLike = DEFAULT_SCORE,
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
) -> Array:
    """The weights of `local_attention`, materialised.

    Args:
        query, key, centers, radius, sigma, score, params, mask, bias: as in `local_attention`.

    Returns:
        weights [*B, T, S] in the query's dtype.

    Raises:
        ValueError: as in `local_attention`.

    >>> weights = local_attention_weights(
    ...     jnp.zeros((1, 2)), jnp.ones((4, 2)), centers=jnp.array([1.0]), radius=1, sigma=0.5
    ... )
    >>> weights.round(4)  # 1/3 for each key in the window, times exp(-2), 1, exp(-2)
    Array([[0.0451, 0.3333, 0.0451, 0.    ]], dtype=float32)
    """
    mask, gaussian = _window_and_gaussian(centers, radius, sigma, mask)
    weights = attention_weights(query, key, score=score, params=params, mask=mask, bias=bias)
    if gaussian is None:
        return weights
    damping = jnp.exp(gaussian.materialize(*weights.shape[-2:]))
    damping, weights = same_rank(damping, weights)
    return weights * damping.astype(weights.dtype)


def _window_and_gaussian(
    centers: Array, radius: int, sigma: float | Array | None, mask: Mask | Array | None
) -> tuple[Mask, Bias | None]:
    """The mask with the window, and the Gaussian bias, None without sigma."""
    window = window_mask(centers, radius)
    gaussian = None if sigma is None else gaussian_bias(centers, sigma)
    return window if mask is None else as_mask(mask) & window, gaussian
