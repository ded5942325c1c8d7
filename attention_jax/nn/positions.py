"""Position ids, and how they enter attention.

A position id is the number that encodes the position of a token. It becomes a vector that is added
to the token's embedding (`sinusoidal_encoding`, or a row of a learned table), or a rotation of the
token's features (`rotary`). Positions are counted from the start or the end of the sequence
(`anchored_positions`), and in training their ids may be random (`random_position_ids`,
`random_window_position_ids`).
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import (
    accumulator_dtype,
    any_array,
    float_array,
    integer_array,
    pad_rank,
)
from attention_jax.core.checks import check_choice, check_integer, check_real, checked_rng
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.functional.checks import check_axes

Array = jax.Array
Anchor = Literal["start", "end", "both"]

# --- from position ids to features ---


def sinusoidal_encoding(
    position_ids: Array,
    dim: int,
    *,
    max_wavelength: float = 10_000.0,
    min_wavelength: float = 1.0,
) -> Array:
    """Sines and cosines of geometrically spaced frequencies.

        encoding(i) = [sin(i w_0), ..., sin(i w_{dim/2-1}), cos(i w_0), ...],
        1 / w_n = min_wavelength (max_wavelength / min_wavelength)^(2n/dim)

    Args:
        position_ids: i, int or float [...].
        dim: size of an encoding, even.
        max_wavelength: the slowest wave repeats after about 2 pi times this many positions.
        min_wavelength: the fastest wave repeats after 2 pi times this many positions. Below 1 / pi
            it would be an alias of a slower wave.

    Returns:
        float32 [..., dim], entries in [-1, 1]. Angles are rounded to float32: the error is about
        2e-8 i, 0.02 for i = 1e6.

    Raises:
        ValueError: `dim` is odd, or a wavelength is not above 0.

    >>> sinusoidal_encoding(jnp.arange(2), 2).round(4)
    Array([[0.    , 1.    ],
           [0.8415, 0.5403]], dtype=float32)

    Source: Vaswani et al. 2017, section 3.5 (which interleaves sines and cosines; a permutation).
    """
    position_ids = any_array("position_ids", position_ids)
    if check_integer("dim", dim) % 2:
        raise ValueError(f"dim must be even, a sine and a cosine for each frequency; got {dim}")
    check_real("max_wavelength", max_wavelength, above=0)
    check_real("min_wavelength", min_wavelength, above=0)
    angles = _angles(position_ids, dim, max_wavelength, min_wavelength, jnp.float32)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def rows_of(table: Array, ids: Array) -> Array:
    """`table[ids]`; on a mesh with Explicit axes, sharded as `ids` are.

    A row that the table does not have, such as row -1, is NaN.

    >>> rows_of(jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 2, -1]))
    Array([[ 2.],
           [ 1.],
           [nan],
           [nan]], dtype=float32)
    """

    def take(table: Array, ids: Array) -> Array:
        return jnp.asarray(table).at[ids].get(mode="fill", wrap_negative_indices=False)

    return on_automatic_axes(take, explicit_spec(ids), table, ids)


def rotary(
    x: Array, position_ids: Array | None = None, *, max_wavelength: float = 10_000.0
) -> Array:
    """Rotates pairs of features by angles that grow with the position id.

        (x_n, x_{n + D/2}) -> rotated by the angle i w_n,  w_n = max_wavelength^(-2n/D)

    The dot product of a rotated query i and key j depends on the tokens and on j - i alone.

    Args:
        x: float [..., T, D], D even.
        position_ids: i, int [T]; or [*B, T], where *B are the first axes of `x`; None for 0, 1, 2,
            ...
        max_wavelength: the slowest rotation repeats after about 2 pi times this many positions.

    Returns:
        [..., T, D] in the dtype of `x`; angles are computed in at least float32, which rounds them
        as in `sinusoidal_encoding`.

    Raises:
        ValueError: D is odd, `position_ids` does not fit `x`, or the wavelength is not above 0.

    >>> rotary(jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.array([0, 1])).round(4)
    Array([[1.    , 0.    ],
           [0.5403, 0.8415]], dtype=float32)

    Source: Su et al. 2021, equations 15 and 34 (which pair neighbours, x_{2n} and x_{2n+1}; a
    permutation of features).
    """
    check_real("max_wavelength", max_wavelength, above=0)
    x = check_axes("x", float_array("x", x), ("T", "D"), None)
    *batch, length, dim = x.shape
    if dim % 2:
        raise ValueError(f"x must have an even number of features to rotate in pairs; got {dim}")
    position_ids = jnp.arange(length) if position_ids is None else position_ids
    position_ids = any_array("position_ids", position_ids)
    *lead, last = position_ids.shape or (0,)
    if last != length or lead != batch[: len(lead)]:
        raise ValueError(
            f"position_ids must be [{length}], or [*B, {length}] with the first axes *B of x"
            f" {list(x.shape)}; got {list(position_ids.shape)}"
        )
    wide = accumulator_dtype(x)
    angles = _angles(position_ids, dim, max_wavelength, 1.0, wide)
    # [*B, T, D / 2] to the rank of x: the axes of x that position_ids lack come between *B and T.
    angles = angles.reshape(*lead, *(1,) * (len(batch) - len(lead)), length, dim // 2)
    cosines, sines = (pad_rank(f(angles), x.ndim) for f in (jnp.cos, jnp.sin))
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = [left * cosines - right * sines, right * cosines + left * sines]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _angles(position_ids: Array, dim: int, longest: float, shortest: float, dtype: Any) -> Array:
    exponents = jnp.arange(dim // 2, dtype=dtype) / (dim // 2)
    frequencies = (longest / shortest) ** -exponents / shortest
    return position_ids[..., None].astype(dtype) * pad_rank(frequencies, position_ids.ndim + 1)


# --- from tokens to position ids ---


def anchored_positions(length: int, lengths: Array, anchor: Anchor) -> tuple[Array, ...]:
    """The position of each token, counted from the start of its sequence, from its end, or both.

        start: j        end: n - 1 - j

    Args:
        length: S, tokens of a padded sequence.
        lengths: int [*B], n, how many of them are real.
        anchor: "start", "end" or "both".

    Returns:
        one int array [*B, S]; with "both" two arrays, from the start and from the end. Counted from
        the end, padding has position 0.

    Raises:
        ValueError: there is no such anchor.

    >>> anchored_positions(4, jnp.array([3]), "end")
    (Array([[2, 1, 0, 0]], dtype=int32),)

    Counted from the end, each source letter of a reversed string has the position of the target
    letter that it becomes: letter n - 1 - i is written as letter i.
    """
    check_choice("anchor", anchor, Anchor)
    check_integer("length", length, 0)
    lengths = integer_array("lengths", lengths)
    positions = pad_rank(jnp.arange(length), lengths.ndim + 1)
    lengths = lengths[..., None].astype(positions.dtype)
    # Both are sharded as the lengths are, over Explicit mesh axes.
    from_start, from_end = positions + 0 * lengths, jnp.maximum(lengths - 1 - positions, 0)
    return {"start": (from_start,), "end": (from_end,), "both": (from_start, from_end)}[anchor]


def random_position_ids(rng: Array, count: int, limit: int) -> Array:
    """An ordered random subset of position ids, all subsets equally likely.

    Args:
        rng: one PRNG key.
        count: size of the subset.
        limit: P; ids are from 0 to P - 1.

    Returns:
        int32 [count], increasing.

    Raises:
        ValueError: `count` is not from 1 to `limit`.

    >>> random_position_ids(jax.random.key(0), 4, 4)
    Array([0, 1, 2, 3], dtype=int32)

    Source: Ruoss et al. 2023, section 3 (their N is `count`, their L `limit`).
    """
    rng, count, limit = _checked_draw(rng, count, limit)
    _, chosen = jax.lax.top_k(jax.random.uniform(rng, (limit,)), count)
    return jnp.sort(chosen).astype(jnp.int32)


def random_window_position_ids(rng: Array, count: int, limit: int) -> Array:
    """An ordered random subset of a random window: from neighbours to ids far apart.

    The width of the window is log-uniform from `count` to `limit`, and its start is uniform, so
    that gaps of every scale between ids are equally common. A subset of the whole range would
    hardly have neighbouring ids, while a sequence that fills the range has nothing else.

    Args:
        rng: one PRNG key.
        count: size of the subset.
        limit: P; ids are from 0 to P - 1.

    Returns:
        int32 [count], increasing.

    Raises:
        ValueError: `count` is not from 1 to `limit`.

    >>> random_window_position_ids(jax.random.key(0), 4, 4)
    Array([0, 1, 2, 3], dtype=int32)
    """
    rng, count, limit = _checked_draw(rng, count, limit)
    width_rng, start_rng, gap_rng = jax.random.split(rng, 3)
    log_width = jax.random.uniform(
        width_rng, minval=math.log(count), maxval=math.log(limit + 1), dtype=jnp.float32
    )
    spare = jnp.clip(jnp.exp(log_width).astype(jnp.int32), count, limit) - count
    # `count` sorted numbers from 0 to spare, with repetition; adding i to the i-th makes them
    # different.
    gaps = jnp.sort(jax.random.randint(gap_rng, (count,), 0, spare + 1, jnp.int32))
    start = jax.random.randint(start_rng, (), 0, limit - count - spare + 1, jnp.int32)
    return start + gaps + jnp.arange(count, dtype=jnp.int32)


def _checked_draw(rng: Any, count: Any, limit: Any) -> tuple[Array, int, int]:
    """The arguments; ValueError unless `count` ids can be drawn from `limit`."""
    limit = check_integer("limit", limit)
    return checked_rng(rng, name="rng"), check_integer("count", count, 1, limit), limit


# Positions that solve strings far longer than those of training, if letter i of the output is
# letter i from the source's end: `ModelConfig(**ANY_LENGTH)`. Fast waves tell neighbours apart, the
# scale tells encodings from letters.
ANY_LENGTH: dict[str, Any] = {
    "positions": "sinusoidal",
    "position_anchor": "end",
    "position_draw": "window",
    "position_limit": 8192,
    "max_wavelength": 100.0,
    "min_wavelength": 0.4,
    "position_scale": 8.0,
}
