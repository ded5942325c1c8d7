"""Local attention: every query looks through a window around the key that it is aligned with.

    local-m    the alignment is known: p_i = i, or any other (reversal wants S - 1 - i)
    local-p    the alignment is predicted: p_i = S sigmoid(v . tanh(W q_i)), and a Gaussian around
               it lets gradients reach W and v

Windows are masks, the Gaussian is a bias: both are asked tile by tile, so that time and memory are
linear in the window with every score.

Source: Luong, Pham and Manning 2015, section 3.2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, any_array, float_array
from attention_jax.core.checks import check_integer
from attention_jax.functional.attention import attention, attention_weights
from attention_jax.functional.capture_point import no_capture_points
from attention_jax.implementations import BlockSizes
from attention_jax.pairwise.biases import Bias, as_bias, bias_dataclass
from attention_jax.pairwise.mask_algebra import Mask, TileStatus, as_mask, mask_dataclass
from attention_jax.pairwise.position_functions import (
    array_field,
    broadcasts,
    check_batch_axes,
    same_rank,
    take,
)
from attention_jax.scores import DEFAULT_SCORE, Params, ScoreLike

Array = jax.Array


@mask_dataclass
class WindowMask(Mask):
    """Query i sees keys |j - center_i| <= radius."""

    radius: int
    centers: Array = array_field("T")

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        centers = take(self.centers, query_positions, axis=-1)[..., :, None]
        keys, centers = same_rank(key_positions.astype(centers.dtype)[None, :], centers)
        return jnp.abs(keys - centers) <= self.radius

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        centers = take(self.centers, query_positions, axis=-1)
        keys = key_positions.astype(centers.dtype)
        lowest, highest = centers.min(), centers.max()
        beside = (keys[0] - highest > self.radius) | (lowest - keys[-1] > self.radius)
        within = (keys[-1] - lowest <= self.radius) & (highest - keys[0] <= self.radius)
        return TileStatus(empty=beside, full=within)

    def most_keys(self) -> int:
        return 2 * self.radius + 1


@bias_dataclass
class GaussianBias(Bias):
    """b_ij = -(j - center_i)^2 / (2 sigma^2), the logarithm of a Gaussian"""

    centers: Array = array_field("T")
    sigma: Array = array_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        centers = take(self.centers, query_positions, axis=-1)[..., :, None]
        # No window is around NaN; so that none reaches sigma from there.
        centers = jnp.where(jnp.isnan(centers), 0, centers)
        keys, centers = same_rank(key_positions.astype(centers.dtype)[None, :], centers)
        distances, sigma = same_rank(keys - centers, self.sigma[..., None, None])
        return -((distances / sigma) ** 2) / 2


def window_mask(centers: Array, radius: int) -> Mask:
    """Query i sees the keys at most `radius` from `centers[i]`.

    Args:
        centers: float or int [*B, T] in units of key positions; need not be whole or in range.
        radius: at least 0; the paper's D.

    Returns:
        a `Mask`. It has no gradient in the centers: see `local_attention`.

    Raises:
        ValueError: an argument has the wrong dtype or range.

    >>> window_mask(jnp.array([3, 0]), 1).materialize(2, 5).astype(int).tolist()
    [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    """
    return WindowMask(checked_radius(radius), _checked_centers(centers))


def gaussian_bias(centers: Array, sigma: float | Array) -> Bias:
    """b_ij = -(j - center_i)^2 / (2 sigma^2), which multiplies weights by a Gaussian.

    Args:
        centers: float [*B, T], in units of key positions.
        sigma: standard deviation, in the same units; a positive float, or a float array whose axes
            broadcast to *B.

    Returns:
        a `Bias`; gradients reach the centers, and sigma.

    Raises:
        ValueError: an argument has the wrong dtype or range.

    >>> gaussian_bias(jnp.array([1.0]), 0.5).materialize(1, 3).tolist()
    [[-2.0, -0.0, -2.0]]
    """
    centers = _checked_centers(centers)
    if not jnp.issubdtype(centers.dtype, jnp.floating):
        centers = centers.astype(float)  # the widest there is, for a sigma in float64
    return GaussianBias(centers, _checked_sigma(sigma).astype(centers.dtype))


def monotonic_centers(target_length: int) -> Array:
    """p_i = i, local-m's own: source and target advance together.

    >>> monotonic_centers(3).tolist()
    [0, 1, 2]

    Source: Luong et al. 2015, section 3.2, "monotonic alignment".
    """
    return jnp.arange(target_length)


def reversed_centers(target_length: int, source_lengths: Array) -> Array:
    """p_i = S - 1 - i, the anti-diagonal: what a reversal wants.

    Args:
        target_length: T.
        source_lengths: int [*B], S of each example.

    Returns:
        int [*B, T]; negative from the S-th query on.

    >>> reversed_centers(3, jnp.array([3, 2])).tolist()
    [[2, 1, 0], [1, 0, -1]]
    """
    check_integer("target_length", target_length, 0)
    lengths = checked_lengths(source_lengths, None)
    lengths, steps = same_rank(lengths[..., None], jnp.arange(target_length))
    return lengths - 1 - steps


def predicted_centers(query: Array, params: Params, source_lengths: Array) -> Array:
    """p_i = S sigmoid(v . tanh(W q_i)), local-p's: where each query says that it looks

    Args:
        query: float [*B, T, Dq].
        params: {"kernel": W, [Dq, A]; "v": [A]}.
        source_lengths: int [*B], size 1 where shared, or []; S of each example.

    Returns:
        float [*B, T] in [0, S], in at least float32; NaN, around which no window is, for a query
        that is not finite (padding, say), which sends no gradient.

    Raises:
        ValueError: the parameters do not fit the query.

    >>> params = {"kernel": jnp.eye(2), "v": jnp.zeros(2)}
    >>> predicted_centers(jnp.ones((3, 2)), params, jnp.array(8)).tolist()
    [4.0, 4.0, 4.0]

    Source: Luong et al. 2015, equation 9 (their W_p, v_p are W, v).
    """
    if not isinstance(params, dict) or set(params) != {"kernel", "v"}:
        raise ValueError(f"params must be {{'kernel': [Dq, A], 'v': [A]}}; got {params!r}")
    source_lengths = checked_lengths(source_lengths, query.shape[:-2])
    kernel, v = params["kernel"], params["v"]
    if kernel.shape != (query.shape[-1], *v.shape) or v.ndim != 1:
        raise ValueError(
            f"params must be {{'kernel': [{query.shape[-1]}, A], 'v': [A]}} for query"
            f" {list(query.shape)}; got {list(kernel.shape)} and {list(v.shape)}"
        )
    dtype = accumulator_dtype(query, kernel, v)
    query, kernel, v = (array.astype(dtype) for array in (query, kernel, v))
    finite = jnp.all(jnp.isfinite(query), axis=-1)
    query = jnp.where(finite[..., None], query, 0)
    hidden = jnp.tanh(jnp.matmul(query, kernel, precision="highest"))
    fraction = jax.nn.sigmoid(jnp.matmul(hidden, v, precision="highest"))
    fraction = jnp.where(finite, fraction, jnp.nan)
    lengths, fraction = same_rank(source_lengths[..., None], fraction)
    return lengths.astype(dtype) * fraction


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
    """Attention through windows, with any score.

        w_ij = softmax_j(logits_ij where |j - p_i| <= D) exp(-(j - p_i)^2 / (2 sigma^2))
        output_i = sum_j w_ij value_j

    With a Gaussian the weights of a row sum to less than 1, as in the paper: it comes after the
    softmax. Gradients reach the centers p through the Gaussian, not through the window's edges.
    Time and memory are linear in T times the window where the tiled implementation serves (twice
    the time with a Gaussian, which is a second pass for the normaliser).

    Args:
        query, key, value, score, params, mask, bias, dropout_rate, dropout_rng, implementation,
            block_sizes: as in `attention`.
        centers: float or int [*B, T], p; see `monotonic_centers`, `reversed_centers`,
            `predicted_centers`. They need not be in range: a window beside all keys has output 0.
        radius: D, at least 0.
        sigma: standard deviation of the Gaussian, in key positions; the paper's is D / 2. None: no
            Gaussian (local-m).

    Returns:
        output [*B, T, Dv] in the query's dtype.

    Raises:
        ValueError: an argument has the wrong shape, dtype or range.

    >>> tokens = jnp.eye(4)
    >>> local_attention(tokens, tokens, tokens, centers=monotonic_centers(4), radius=0).tolist()[1]
    [0.0, 1.0, 0.0, 0.0]

    Source: Luong, Pham and Manning 2015, section 3.2, equations 7, 9 and 10.
    """
    mask, gaussian = _window_and_gaussian(centers, radius, sigma, mask)
    arguments: Any = {
        "score": score, "params": params, "mask": mask, "implementation": implementation,
        "block_sizes": block_sizes,
    }  # fmt: skip
    dropout: Any = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    if gaussian is None:
        return attention(query, key, value, bias=bias, **arguments, **dropout)
    both = gaussian if bias is None else as_bias(bias) + gaussian
    output, damped = attention(
        query, key, value, bias=both, **arguments, **dropout, return_statistics=True
    )
    # softmax(l) g = softmax(l + log g) sum(exp(l) g) / sum(exp(l)): the normalisers' ratio remains.
    nothing = jnp.zeros((*np.shape(key)[:-1], 1), output.dtype)
    with no_capture_points():
        _, plain = attention(query, key, nothing, bias=bias, **arguments, return_statistics=True)
    empty = plain.logsumexp == -jnp.inf  # where the difference would be NaN
    difference = jnp.where(empty, 0, damped.logsumexp) - jnp.where(empty, 0, plain.logsumexp)
    return output * jnp.exp(difference).astype(output.dtype)[..., None]


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
    """The weights that `local_attention` gives to values, materialised.

    Args:
        query, key, centers, radius, sigma, score, params, mask, bias: as in `local_attention`.

    Returns:
        weights [*B, T, S] in the query's dtype.

    Raises:
        ValueError: as in `local_attention`.

    >>> weights = local_attention_weights(
    ...     jnp.zeros((1, 2)), jnp.ones((4, 2)), centers=jnp.array([1.0]), radius=1, sigma=0.5
    ... )
    >>> weights.round(4)  # a third each in the window, times exp(-2), 1 and exp(-2)
    Array([[0.0451, 0.3333, 0.0451, 0.    ]], dtype=float32)
    """
    mask, gaussian = _window_and_gaussian(centers, radius, sigma, mask)
    weights = attention_weights(query, key, score=score, params=params, mask=mask, bias=bias)
    if gaussian is None:
        return weights
    damping = jnp.exp(gaussian.materialize(*weights.shape[-2:]))
    damping, weights = same_rank(damping, weights)
    return weights * damping.astype(weights.dtype)


def checked_lengths(lengths: Any, batch_shape: tuple[int, ...] | None) -> Array:
    """Lengths of sources, int; ValueError unless they broadcast to the batch axes, if known."""
    array = any_array("source_lengths", lengths)
    fits = batch_shape is None or broadcasts(array.shape, batch_shape)
    if not jnp.issubdtype(array.dtype, jnp.integer) or not fits:
        shape = "" if batch_shape is None else f" that broadcast to {list(batch_shape)}"
        raise ValueError(
            f"source_lengths must be integers{shape}; got {array.dtype} {list(array.shape)}"
        )
    if batch_shape is not None:
        check_batch_axes("source_lengths", array.shape, 0, batch_shape)
    return array


def checked_radius(radius: Any) -> int:
    """A window's radius; ValueError for what is none."""
    check_integer("radius", radius, 0)
    return int(radius)


def _window_and_gaussian(
    centers: Array, radius: int, sigma: float | Array | None, mask: Mask | Array | None
) -> tuple[Mask, Bias | None]:
    window = window_mask(centers, radius)
    gaussian = None if sigma is None else gaussian_bias(centers, sigma)
    return window if mask is None else as_mask(mask) & window, gaussian


def _checked_centers(centers: Any) -> Array:
    """In a dtype that tells all key positions apart: bfloat16 or int8 would not."""
    array = any_array("centers", centers)
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    if not (floating or jnp.issubdtype(array.dtype, jnp.integer)) or array.ndim < 1:
        raise ValueError(f"centers must be numbers [*B, T]; got {array.dtype} {list(array.shape)}")
    return array.astype(accumulator_dtype(array) if floating else int)


def _checked_sigma(sigma: Any) -> Array:
    number = isinstance(sigma, int) and not isinstance(sigma, bool)
    array = float_array("sigma", float(sigma) if number else sigma)
    if not isinstance(array, jax.core.Tracer) and not np.all(np.asarray(sigma) > 0):
        raise ValueError(f"sigma must be greater than 0, or None for no Gaussian; got {sigma!r}")
    return array
