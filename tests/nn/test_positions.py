"""Encodings, rotations, anchored positions and random ids against loops over their formulas."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest

from attention_jax.nn.positions import (
    anchored_positions,
    random_position_ids,
    random_window_position_ids,
    rotary,
    rows_of,
    sinusoidal_encoding,
)


def test_sines_and_cosines():
    ids = np.array([[0, 5, 3, 2.5], [11, 1, 7, 101]])
    waves = {"max_wavelength": 50.0, "min_wavelength": 0.5}
    encodings = np.asarray(jax.jit(lambda ids: sinusoidal_encoding(ids, 6, **waves))(ids))
    assert encodings.dtype == np.float32
    angles = ids[..., None] / (0.5 * 100 ** (np.arange(3) / 3))
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    np.testing.assert_allclose(encodings, expected, atol=2e-5)
    with pytest.raises(ValueError, match=r"dim must be even.*; got 7"):
        sinusoidal_encoding(jnp.arange(3), 7)


# --- a learned table ---


def table():
    return jnp.asarray(np.random.default_rng(3).normal(size=(5, 3)), jnp.float32)


def test_rows_of_a_table():
    positions = np.array([[4, 0, 4, 1], [2, 5, 97, 3]], np.int32)
    encodings = jax.jit(rows_of)(table(), positions)
    assert encodings.shape == (2, 4, 3)
    for index in np.ndindex(2, 4):
        at = positions[index]
        expected = np.asarray(table())[at] if at < 5 else [math.nan] * 3
        np.testing.assert_array_equal(encodings[index], expected)


# --- rotations ---


def test_what_cannot_be_rotated():
    with pytest.raises(ValueError, match=r"x must have an even number of features .*; got 3"):
        rotary(jnp.ones((5, 3)), jnp.arange(5))
    with pytest.raises(ValueError, match=r"position_ids must be \[5\], or .*; got \[4\]"):
        rotary(jnp.ones((2, 5, 4)), jnp.arange(4))
    of_x = r"position_ids must be \[5\], or \[\*B, 5\] .* of x \[2, 5, 4\]; got "
    for shape in ((), (3, 5), (5, 2), (1, 5), (2, 5, 5)):
        expected = of_x + rf"\[{', '.join(map(str, shape))}\]"
        with pytest.raises(ValueError, match=expected):
            rotary(jnp.ones((2, 5, 4)), jnp.zeros(shape, jnp.int32))


def test_every_example_has_positions_of_its_own():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)  # [B, N, T, D]
    ids = rng.integers(0, 23, size=(2, 5)).astype(np.int32)
    found, by_default, consecutive = numpy_model.run_jit(
        lambda x, ids: (rotary(x, ids, max_wavelength=50.0), rotary(x), rotary(x, jnp.arange(5))),
        x,
        ids,
    )
    np.testing.assert_array_equal(by_default, consecutive)
    for b, n in np.ndindex(2, 3):
        expected = numpy_model.rotated(np.float64(x[b, n]), ids[b], 50.0)
        np.testing.assert_allclose(found[b, n], expected, atol=1e-5)


# --- anchored positions ---


@pytest.mark.parametrize(
    ("anchor", "lengths"),
    [("both", [[0, 1, 7], [3, 5, 2]]), ("start", [4]), ("end", 5)],
)
def test_positions_are_counted_from_each_end(anchor, lengths):
    lengths = np.array(lengths, np.int32)
    found = jax.jit(anchored_positions, static_argnums=(0, 2))(7, lengths, anchor)
    start, end = np.zeros((2, *lengths.shape, 7), int)
    for example in np.ndindex(lengths.shape):
        real = list(range(lengths[example]))
        start[example] = range(7)
        for j, left in zip(real, reversed(real), strict=True):
            end[example][j] = left
    expected = {"start": [start], "end": [end], "both": [start, end]}[anchor]
    assert len(found) == len(expected)
    for got, positions in zip(found, expected, strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, positions)


# --- random ids ---


def many(draw, *sizes, keys):
    """Ids drawn with each key, for each (count, limit) of `sizes`; all in one program."""

    @jax.jit
    @jax.vmap
    def draws(rng):
        return [draw(rng, *size) for size in sizes]

    return [np.asarray(ids) for ids in draws(jax.random.split(jax.random.key(11), keys))]


def assert_drawn_with(probabilities, drawn):
    """Each row of `drawn` is a key of `probabilities`, as often as they say."""
    found = dict.fromkeys(probabilities, 0)
    for row in drawn.tolist():
        found[tuple(row)] += 1
    observed = np.array(list(found.values()))
    expected = len(drawn) * np.array(list(probabilities.values()))
    assert expected.sum() == pytest.approx(len(drawn))
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum(), len(found) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # mean and standard deviation


every_draw = pytest.mark.parametrize("draw", [random_position_ids, random_window_position_ids])


@every_draw
def test_more_ids_than_there_are_cannot_be_drawn(draw):
    for count in (0, 8):
        with pytest.raises(ValueError, match=rf"count must be from 1 to 7, .*; got {count}"):
            draw(jax.random.key(0), count, 7)


def test_all_subsets_are_equally_likely():
    subsets = list(itertools.combinations(range(7), 3))
    (drawn,) = many(random_position_ids, (3, 7), keys=10_007)
    assert_drawn_with(dict.fromkeys(subsets, 1 / len(subsets)), drawn)


def window_probabilities(limit):
    """Of every two ids, by counting: widths, starts and gaps."""
    found = dict.fromkeys(itertools.combinations(range(limit), 2), 0.0)
    for width in range(2, limit + 1):
        of_width = math.log((width + 1) / width) / math.log((limit + 1) / 2)
        gaps = list(itertools.product(range(width - 1), repeat=2))
        for first in range(limit - width + 1):
            for pair in gaps:
                left, right = sorted(pair)
                share = of_width / (limit - width + 1)
                found[first + left, first + right + 1] += share / len(gaps)
    return found


def test_windows_have_log_uniform_widths_and_uniform_starts():
    (drawn,) = many(random_window_position_ids, (2, 7), keys=20_011)
    assert_drawn_with(window_probabilities(7), drawn)
