"""Local attention: each query attends to a window of keys around its center.

The window is a mask and the Gaussian a bias, both functions of position that are evaluated tile by
tile, so that time and memory are linear in the size of the window. `centers` computes the centers.

Source: Luong, Pham and Manning 2015, section 3.2.
"""

from __future__ import annotations

import numbers
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, any_array, float_array
from attention_jax.core.checks import check_integer
from attention_jax.functional.attention import attention_of, weights_of
from attention_jax.functional.checks import (
    NO_VALUE,
    AttentionArguments,
    WeightsArguments,
    checked_call,
    hinted,
)
from attention_jax.positions.biases import Bias, bias_dataclass
from attention_jax.positions.mask_algebra import Mask, TileStatus, as_mask, mask_dataclass
from attention_jax.positions.position_functions import array_field, pad_rank, same_rank, take
from attention_jax.tiles import Inputs, Options

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
    centers = _checked_centers(centers)
    window, mask = window_mask(centers, radius), arguments.get("mask")
    mask = window if mask is None else as_mask(mask) & window
    options, inputs = checked_call(*tokens, **{**arguments, "mask": mask})
    if sigma is None:
        return options, inputs
    if jnp.issubdtype(centers.dtype, jnp.floating):
        centers = _finite(centers)  # the window has made rows without a center NaN
    damping = gaussian_bias(centers, sigma)
    damping.check(inputs.query.shape[:-2], inputs.query.shape[-2], inputs.key.shape[-2])
    return options, inputs._replace(damping=damping)


# --- the window and the Gaussian, as functions of position ---


@mask_dataclass
class WindowMask(Mask):
    """Query i may attend to keys with |j - center_i| <= radius; to all if its center is NaN."""

    radius: int
    centers: Array = array_field("T")

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        centers = take(self.centers, query_positions, axis=-1)[..., :, None]
        keys, centers = same_rank(key_positions.astype(centers.dtype)[None, :], centers)
        return ~(jnp.abs(keys - centers) > self.radius)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        centers = take(self.centers, query_positions, axis=-1)
        keys = key_positions.astype(centers.dtype)
        lowest, highest = centers.min(), centers.max()
        empty = (keys[0] - highest > self.radius) | (lowest - keys[-1] > self.radius)
        full = (keys[-1] - lowest <= self.radius) & (highest - keys[0] <= self.radius)
        return TileStatus(empty=empty, full=full)

    def most_keys(self) -> int:
        return 2 * self.radius + 1


@bias_dataclass
class GaussianBias(Bias):
    """b_ij = -(j - center_i)^2 / (2 sigma^2), the logarithm of a Gaussian"""

    centers: Array = array_field("T")
    sigma: Array = array_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        centers = take(self.centers, query_positions, axis=-1)[..., :, None]
        unknown = jax.lax.stop_gradient(jnp.where(jnp.isnan(centers), jnp.nan, 0))
        # Where a mask hides the pair, a center that is NaN or infinite sends no NaN to sigma.
        keys, centers = same_rank(key_positions.astype(centers.dtype)[None, :], _finite(centers))
        distances, sigma = same_rank(keys - centers, self.sigma[..., None, None])
        # The slope distance^2 / sigma^3 of a weight that is 0 may overflow, and 0 * inf is NaN.
        near = ~((jnp.abs(distances) > 1e4 * sigma) | (sigma <= 1e-15))
        ratios = jnp.where(near, distances, 0) / jnp.where(near, sigma, 1)
        far = jax.lax.stop_gradient(distances / sigma)
        squares = jnp.where(near, ratios, far) ** 2
        return -(squares + pad_rank(unknown, distances.ndim)) / 2


@jax.custom_jvp
def _finite(centers: Array) -> Array:
    """The centers with 0 in place of NaN and infinities; their cotangents pass, NaN included."""
    return jnp.where(jnp.isfinite(centers), centers, 0)


_finite.defjvps(lambda dcenters, _, centers: dcenters)


def window_mask(centers: Array, radius: int) -> Mask:
    """The mask in which query i may attend to the keys at most `radius` from `centers[i]`.

    Args:
        centers: float or int [*B, T] in units of key positions; they may be fractional, and outside
            of [0, S).
        radius: the paper's D, an int from 0 to 2^31 - 1.

    Returns:
        a `Mask`. It is not differentiable in the centers; see `local_attention`. A center that is
        NaN hides no key; attention makes its row NaN.

    Raises:
        ValueError: an argument has the wrong dtype or range.

    >>> window_mask(jnp.array([3, 0]), 1).materialize(2, 5).astype(int).tolist()
    [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    """
    return WindowMask(check_integer("radius", radius, 0, 2**31 - 1), _checked_centers(centers))


def gaussian_bias(centers: Array, sigma: float | Array) -> Bias:
    """b_ij = -(j - center_i)^2 / (2 sigma^2), a bias that multiplies weights by a Gaussian.

    Args:
        centers: float [*B, T], in units of key positions.
        sigma: standard deviation, in the same units; a positive scalar, or a float array whose axes
            broadcast to [*B].

    Returns:
        a `Bias`, differentiable in the centers and in sigma.

    Raises:
        ValueError: an argument has the wrong dtype or range.

    >>> gaussian_bias(jnp.array([1.0]), 0.5).materialize(1, 3).tolist()
    [[-2.0, -0.0, -2.0]]
    """
    centers = _checked_centers(centers)
    if not jnp.issubdtype(centers.dtype, jnp.floating):
        centers = centers.astype(float)  # the widest float type, for a sigma in float64
    return GaussianBias(centers, _checked_sigma(sigma).astype(centers.dtype))


def _checked_centers(centers: Any) -> Array:
    """The centers as an array [*B, T] of at least float32 or int32; ValueError for other arguments.

    A narrower type, such as bfloat16 or int8, cannot represent every key position.
    """
    array = any_array("centers", centers)
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    if not (floating or jnp.issubdtype(array.dtype, jnp.integer)) or array.ndim < 1:
        raise ValueError(f"centers must be numbers [*B, T]; got {array.dtype} {list(array.shape)}")
    if floating:
        return array.astype(accumulator_dtype(array))
    return jnp.clip(array.astype(int), -(2**30), 2**30)  # distances to positions do not overflow


def _checked_sigma(sigma: Any) -> Array:
    """Sigma as a float array; ValueError unless it is positive."""
    number = isinstance(sigma, numbers.Integral) and not isinstance(sigma, bool)
    array = float_array("sigma", float(sigma) if number else sigma)
    least = np.finfo(np.float32).tiny  # XLA takes smaller floats for 0
    if not isinstance(array, jax.core.Tracer) and not np.all(np.asarray(sigma) >= least):
        raise ValueError(f"sigma must be greater than 0, or None for no Gaussian; got {sigma!r}")
    return array
