"""Where a token stands: as a vector to add to its embedding, or as a rotation of its features."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from attention_jax.position_functions import pad_rank
from attention_jax.softmax import accumulator_dtype

Array = jax.Array


def sinusoidal_positions(length: int, dim: int, *, max_wavelength: float = 10_000.0) -> Array:
    """Sines and cosines of geometrically spaced frequencies.

        code[i] = [sin(i w_0), ..., sin(i w_{dim/2-1}), cos(i w_0), ...],  w_n = max_wavelength^(-2n/dim)

    Args:
        length: number of positions.
        dim: size of a code, even.
        max_wavelength: the slowest wave repeats after about 2 pi times this many positions.

    Returns:
        float32 [length, dim], entries in [-1, 1].

    Raises:
        ValueError: `dim` is odd.

    >>> sinusoidal_positions(2, 2).round(4)
    Array([[0.    , 1.    ],
           [0.8415, 0.5403]], dtype=float32)

    Source: Vaswani et al. 2017, section 3.5 (which interleaves sines and cosines; a permutation).
    """  # noqa: E501 -- one formula, one line
    return sinusoidal_codes(jnp.arange(length), dim, max_wavelength=max_wavelength)


def sinusoidal_codes(positions: Array, dim: int, *, max_wavelength: float = 10_000.0) -> Array:
    """`sinusoidal_positions` at given positions, int or float [length], known or traced.

    >>> sinusoidal_codes(jnp.array([1]), 2).round(4)
    Array([[0.8415, 0.5403]], dtype=float32)
    """
    if dim % 2:
        raise ValueError(f"dim must be even, a sine and a cosine for each frequency; got {dim}")
    exponents = jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2)
    angles = positions.astype(jnp.float32)[:, None] * (max_wavelength**-exponents)[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def check_wavelength(name: str, value: float) -> None:
    """Raises ValueError unless it is a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise ValueError(f"{name} must be a finite number above 0; got {value!r}")


def rotary(x: Array, positions: Array, *, max_wavelength: float = 10_000.0) -> Array:
    """Rotates pairs of features by angles that grow with the position.

        (x_n, x_{n + D/2}) -> rotated by the angle i w_n,  w_n = max_wavelength^(-2n/D)

    The dot product of a rotated query i and key j depends on the tokens and on j - i alone.

    Args:
        x: float [..., T, D], D even.
        positions: int [T], i.
        max_wavelength: the slowest rotation repeats after about 2 pi times this many positions.

    Returns:
        [..., T, D] in the dtype of `x`; angles are taken in at least float32.

    Raises:
        ValueError: D is odd, `positions` does not have T entries, or the wavelength is not above 0.

    >>> rotary(jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.array([0, 1])).round(4)
    Array([[1.    , 0.    ],
           [0.5403, 0.8415]], dtype=float32)

    Source: Su et al. 2021, equations 15 and 34 (which pair neighbours, x_{2n} and x_{2n+1}; a
    permutation of features).
    """
    check_wavelength("max_wavelength", max_wavelength)
    length, dim = x.shape[-2:]
    if dim % 2:
        raise ValueError(f"x must have an even number of features to rotate in pairs; got {dim}")
    if positions.shape != (length,):
        raise ValueError(f"positions must be [{length}]; got {list(positions.shape)}")
    wide = accumulator_dtype(x)
    exponents = jnp.arange(dim // 2, dtype=wide) / (dim // 2)
    angles = positions.astype(wide)[:, None] * (max_wavelength**-exponents)[None, :]
    cosines, sines = (pad_rank(f(angles), x.ndim) for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = [left * cosines - right * sines, right * cosines + left * sines]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
