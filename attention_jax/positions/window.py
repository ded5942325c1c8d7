"""A window of keys around a center for each query: as a mask, and as a Gaussian bias.

Source: Luong, Pham and Manning 2015, section 3.2.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import (
    accumulator_dtype,
    any_array,
    float_array,
    pad_rank,
    same_rank,
)
from attention_jax.core.checks import check_integer
from attention_jax.positions.contract import Bias, Mask, TileStatus
from attention_jax.positions.function import array_field, position_dataclass, take

Array = jax.Array


@position_dataclass
class WindowMask(Mask):
    """Query i may attend to keys with |j - center_i| <= radius; to all if its center is NaN."""

    radius: int
    centers: Array = array_field("T")

    def at(self, query_positions: Array, key_positions: Array) -> Array:
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


@position_dataclass
class GaussianBias(Bias):
    """b_ij = -(j - center_i)^2 / (2 sigma^2), the logarithm of a Gaussian"""

    centers: Array = array_field("T")
    sigma: Array = array_field()

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        centers = take(self.centers, query_positions, axis=-1)[..., :, None]
        unknown = jax.lax.stop_gradient(jnp.where(jnp.isnan(centers), jnp.nan, 0))
        # Where a mask hides the pair, a center that is NaN or infinite sends no NaN to sigma.
        keys, centers = same_rank(key_positions.astype(centers.dtype)[None, :], finite(centers))
        distances, sigma = same_rank(keys - centers, self.sigma[..., None, None])
        # The slope distance^2 / sigma^3 of a weight that is 0 may overflow, and 0 * inf is NaN.
        near = ~((jnp.abs(distances) > 1e4 * sigma) | (sigma <= 1e-15))
        ratios = jnp.where(near, distances, 0) / jnp.where(near, sigma, 1)
        far = jax.lax.stop_gradient(distances / sigma)
        squares = jnp.where(near, ratios, far) ** 2
        return -(squares + pad_rank(unknown, distances.ndim)) / 2


@jax.custom_jvp
def finite(centers: Array) -> Array:
    """The centers with 0 in place of NaN and infinities; their cotangents pass, NaN included."""
    return jnp.where(jnp.isfinite(centers), centers, 0)


finite.defjvps(lambda dcenters, _, centers: dcenters)


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
    return WindowMask(check_integer("radius", radius, 0, 2**31 - 1), checked_centers(centers))


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
    centers = checked_centers(centers)
    if not jnp.issubdtype(centers.dtype, jnp.floating):
        centers = centers.astype(float)  # the widest float type, for a sigma in float64
    number = isinstance(sigma, numbers.Integral) and not isinstance(sigma, bool)
    array = float_array("sigma", float(sigma) if number else sigma)
    least = np.finfo(np.float32).tiny  # XLA takes smaller floats for 0
    if not isinstance(array, jax.core.Tracer) and not np.all(np.asarray(sigma) >= least):
        raise ValueError(f"sigma must be greater than 0, or None for no Gaussian; got {sigma!r}")
    return GaussianBias(centers, array.astype(centers.dtype))


def checked_centers(centers: Any) -> Array:
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
