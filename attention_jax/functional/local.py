"""Local attention: each query attends to a window of keys around its center.

The window is a mask and the Gaussian a bias, see `positions/window.py`. They are evaluated tile by
tile, so that time and memory are linear in the size of the window. `centers` computes the centers.

Source: Luong, Pham and Manning 2015, section 3.2.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from attention_jax.functional.attention import attention_of, weights_of
from attention_jax.functional.checks import (
    NO_VALUE,
    AttentionArguments,
    WeightsArguments,
    checked_call,
    hinted,
)
from attention_jax.positions.contract import as_mask
from attention_jax.positions.window import checked_centers, finite, gaussian_bias, window_mask
from attention_jax.tiles.options import Inputs, Options

Array = jax.Array


@hinted
def local_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    centers: Array,
    radius: int,
    sigma: float | Array | None = None,
    implementation: str | None = None,
    **arguments: Unpack[AttentionArguments],
) -> Array:
    """Attention in a window around a center for each query, with any score.

        w_ij = normalizer_j(logits_ij where |j - p_i| <= D) exp(-(j - p_i)^2 / (2 sigma^2))
        output_i = sum_j w_ij value_j

    As in the paper, the Gaussian multiplies the weights after they are normalised, so their sum is
    less than 1. The centers p get gradients through the Gaussian, not through the edges of the
    window. A query whose center is NaN has the output NaN, unless the mask hides all its keys. With
    the tiled implementation time and memory are linear in T times the window.

    Args:
        query, key, value, implementation: as in `attention`.
        centers: float or int [*B, T], p; see `monotonic_centers`, `reversed_centers`,
            `predicted_centers`. A window that contains no key gives output 0.
        radius: D, at least 0.
        sigma: standard deviation of the Gaussian, in key positions, as in `gaussian_bias`; D / 2 in
            the paper. None for no Gaussian (local-m).
        arguments: score, params, mask, bias, normalizer, normalizer_params, dropout_rate,
            dropout_rng, block_sizes, as in `attention`. The paper's normaliser is softmax.

    Returns:
        output [*B, T, Dv] in the query's dtype.

    Raises:
        ValueError: an argument has the wrong shape, dtype or range.

    >>> tokens = jnp.eye(4)
    >>> local_attention(tokens, tokens, tokens, centers=jnp.arange(4), radius=0).tolist()[1]
    [0.0, 1.0, 0.0, 0.0]

    Source: Luong, Pham and Manning 2015, section 3.2, equations 7, 9 and 10.
    """
    tokens = query, key, value
    call = _windowed_call(tokens, centers, radius, sigma, AttentionArguments, arguments)
    return attention_of(*call, implementation)


@hinted
def local_attention_weights(
    query: Array,
    key: Array,
    *,
    centers: Array,
    radius: int,
    sigma: float | Array | None = None,
    **arguments: Unpack[WeightsArguments],
) -> Array:
    """The weights of `local_attention` before dropout, materialised.

    Args:
        query, key, centers, radius, sigma: as in `local_attention`.
        arguments: score, params, mask, bias, normalizer, normalizer_params, as in `attention`.

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
    tokens = query, key, NO_VALUE
    call = _windowed_call(tokens, centers, radius, sigma, WeightsArguments, arguments)
    return weights_of(*call)


def _windowed_call(
    tokens: tuple[Any, ...], centers: Any, radius: int, sigma: Any, accepted: type, arguments: Any
) -> tuple[Options, Inputs]:
    """The call of `attention` with the mask of the window and the damping of the Gaussian."""
    for name in arguments.keys() - accepted.__annotations__.keys():
        raise TypeError(f"local attention got an unexpected keyword argument {name!r}")
    centers = checked_centers(centers)
    window, mask = window_mask(centers, radius), arguments.get("mask")
    mask = window if mask is None else as_mask(mask) & window
    options, inputs = checked_call(*tokens, **{**arguments, "mask": mask})
    if sigma is None:
        return options, inputs
    if jnp.issubdtype(centers.dtype, jnp.floating):
        centers = finite(centers)  # the window has made rows without a center NaN
    damping = gaussian_bias(centers, sigma)
    damping.check(inputs.query.shape[:-2], inputs.query.shape[-2], inputs.key.shape[-2])
    return options, inputs._replace(damping=damping)
