"""Where a token stands, as a vector to add to its embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
    if dim % 2:
        raise ValueError(f"dim must be even, a sine and a cosine for each frequency; got {dim}")
    exponents = jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2)
    positions = jnp.arange(length, dtype=jnp.float32)
    angles = positions[:, None] * (max_wavelength**-exponents)[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
