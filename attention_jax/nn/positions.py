"""Where a token stands: which number it gets, and how the number enters attention.

A number becomes a vector to add to the token's embedding (`sinusoidal_codes`, `learned_codes`), or
a rotation of its features (`rotary`). Which number it is, is a matter of the end it is counted from
(`anchored_places`) and of chance (`random_positions`, `random_window_positions`).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import check_choice
from attention_jax.nn.lookup import rows_of
from attention_jax.pairwise.position_functions import pad_rank

Array = jax.Array
Anchor = Literal["start", "end", "both"]

# --- from a number to features ---


def sinusoidal_positions(
    length: int, dim: int, *, max_wavelength: float = 10_000.0, min_wavelength: float = 1.0
) -> Array:
    """Sines and cosines of geometrically spaced frequencies.

        code[i] = [sin(i w_0), ..., sin(i w_{dim/2-1}), cos(i w_0), ...],
        1 / w_n = min_wavelength (max_wavelength / min_wavelength)^(2n/dim)

    Args:
        length: number of positions.
        dim: size of a code, even.
        max_wavelength: the slowest wave repeats after about 2 pi times this many positions.
        min_wavelength: the fastest after 2 pi times this many; below 1 / pi it would be an alias
            of a slower one.

    Returns:
        float32 [length, dim], entries in [-1, 1].

    Raises:
        ValueError: `dim` is odd.

    >>> sinusoidal_positions(2, 2).round(4)
    Array([[0.    , 1.    ],
           [0.8415, 0.5403]], dtype=float32)

    Source: Vaswani et al. 2017, section 3.5 (which interleaves sines and cosines; a permutation).
    """
    wavelengths = {"max_wavelength": max_wavelength, "min_wavelength": min_wavelength}
    return sinusoidal_codes(jnp.arange(length), dim, **wavelengths)


def sinusoidal_codes(
    positions: Array,
    dim: int,
    *,
    max_wavelength: float = 10_000.0,
    min_wavelength: float = 1.0,
) -> Array:
    """`sinusoidal_positions` at given positions, int or float [...] -> float32 [..., dim].

    Raises:
        ValueError: `dim` is odd, or a wavelength is not above 0.

    >>> sinusoidal_codes(jnp.array([1]), 2).round(4)
    Array([[0.8415, 0.5403]], dtype=float32)
    """
    if dim % 2:
        raise ValueError(f"dim must be even, a sine and a cosine for each frequency; got {dim}")
    check_wavelength("max_wavelength", max_wavelength)
    check_wavelength("min_wavelength", min_wavelength)
    angles = _angles(positions, dim, max_wavelength, min_wavelength, jnp.float32)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def learned_codes(table: Array, positions: Array) -> Array:
    """Rows of a table: float [P, D], int [...] -> [..., D].

    A position at or beyond P has a code of NaN: there is none that was learned for it.

    >>> learned_codes(jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 2]))
    Array([[ 2.],
           [ 1.],
           [nan]], dtype=float32)

    Source: Gehring et al. 2017, section 3.1.
    """
    return rows_of(table, positions)


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
        positions: int [T], i; or with axes in front, [*B, T], that are the first of `x`.
        max_wavelength: the slowest rotation repeats after about 2 pi times this many positions.

    Returns:
        [..., T, D] in the dtype of `x`; angles are taken in at least float32.

    Raises:
        ValueError: D is odd, `positions` does not fit `x`, or the wavelength is not above 0.

    >>> rotary(jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.array([0, 1])).round(4)
    Array([[1.    , 0.    ],
           [0.5403, 0.8415]], dtype=float32)

    Source: Su et al. 2021, equations 15 and 34 (which pair neighbours, x_{2n} and x_{2n+1}; a
    permutation of features).
    """
    check_wavelength("max_wavelength", max_wavelength)
    *batch, length, dim = x.shape
    if dim % 2:
        raise ValueError(f"x must have an even number of features to rotate in pairs; got {dim}")
    *lead, last = positions.shape or (0,)
    if last != length or lead != batch[: len(lead)]:
        raise ValueError(
            f"positions must be [{length}], or that behind the first axes of x {list(x.shape)};"
            f" got {list(positions.shape)}"
        )
    wide = accumulator_dtype(x)
    angles = _angles(positions, dim, max_wavelength, 1.0, wide)
    # [*B, T, D / 2] to the axes of x: those that it lacks stand between.
    angles = angles.reshape(*lead, *(1,) * (len(batch) - len(lead)), length, dim // 2)
    cosines, sines = (pad_rank(f(angles), x.ndim) for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = [left * cosines - right * sines, right * cosines + left * sines]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _angles(positions: Array, dim: int, longest: float, shortest: float, dtype: Any) -> Array:
    exponents = jnp.arange(dim // 2, dtype=dtype) / (dim // 2)
    frequencies = (longest / shortest) ** -exponents / shortest
    return positions[..., None].astype(dtype) * pad_rank(frequencies, positions.ndim + 1)


# --- from a place in the sequence to a number ---


def anchored_places(length: int, lengths: Array, anchor: Anchor) -> tuple[Array, ...]:
    """How far each token stands from the start of its sequence, from the end, or both.

        start: j        end: n - 1 - j

    Args:
        length: S, tokens of a padded sequence.
        lengths: int [*B], n, how many of them are real.
        anchor: "start", "end" or "both".

    Returns:
        one int array [*B, S], or with "both" two: from the start and from the end. Counted from
        the end, padding has 0.

    Raises:
        ValueError: there is no such anchor.

    >>> anchored_places(4, jnp.array([3]), "end")
    (Array([[2, 1, 0, 0]], dtype=int32),)

    Counted from the end, the source of a reversed string has the numbers of its target: letter
    n - 1 - i is written i-th.
    """
    check_choice("anchor", anchor, Anchor)
    places = jnp.arange(length)
    from_start = jnp.broadcast_to(places, (*lengths.shape, length))
    places = pad_rank(places, lengths.ndim + 1)
    from_end = jnp.maximum(lengths[..., None].astype(places.dtype) - 1 - places, 0)
    return {"start": (from_start,), "end": (from_end,), "both": (from_start, from_end)}[anchor]


def random_positions(rng: Array, count: int, limit: int) -> Array:
    """An ordered random subset of positions, all subsets equally likely.

    Args:
        rng: one PRNG key.
        count: how many.
        limit: P; positions are from 0 to P - 1.

    Returns:
        int32 [count], rising.

    Raises:
        ValueError: there are not so many.

    >>> random_positions(jax.random.key(0), 4, 4)
    Array([0, 1, 2, 3], dtype=int32)

    Source: Ruoss et al. 2023, section 3 (their N is `count`, their L `limit`).
    """
    check_count(count, limit)
    _, chosen = jax.lax.top_k(jax.random.uniform(rng, (limit,)), count)
    return jnp.sort(chosen).astype(jnp.int32)


def random_window_positions(rng: Array, count: int, limit: int) -> Array:
    """An ordered random subset of a random window: from neighbours to tokens far apart.

    The window's width is log-uniform from `count` to `limit`, and its place uniform; the gaps
    between positions are then as often near 1 as near any other scale. In a subset of the whole
    range hardly any two are neighbours, as they will be in a sequence that fills the range.

    Args, Returns, Raises: as `random_positions`.

    >>> random_window_positions(jax.random.key(0), 4, 4)
    Array([0, 1, 2, 3], dtype=int32)
    """
    check_count(count, limit)
    width_rng, place_rng, gap_rng = jax.random.split(rng, 3)
    log_width = jax.random.uniform(
        width_rng, minval=math.log(count), maxval=math.log(limit + 1), dtype=jnp.float32
    )
    spare = jnp.clip(jnp.exp(log_width).astype(jnp.int32), count, limit) - count
    # `count` numbers from 0 to spare, in order and with repetition; i more for the i-th parts them.
    gaps = jnp.sort(jax.random.randint(gap_rng, (count,), 0, spare + 1, jnp.int32))
    first = jax.random.randint(place_rng, (), 0, limit - count - spare + 1, jnp.int32)
    return first + gaps + jnp.arange(count, dtype=jnp.int32)


def check_count(count: int, limit: int) -> None:
    """Raises ValueError unless `limit` positions hold `count` tokens."""
    if not 1 <= count <= limit:
        raise ValueError(f"count must be from 1 to {limit}, the positions there are; got {count}")
