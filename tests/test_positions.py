"""Sinusoidal positions and rotations against loops over their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.nn.positions import rotary, sinusoidal_codes, sinusoidal_positions


@pytest.mark.parametrize("max_wavelength", [10_000.0, 50.0])
def test_is_the_formula(max_wavelength):
    codes = np.asarray(sinusoidal_positions(13, 6, max_wavelength=max_wavelength))
    assert codes.shape == (13, 6)
    assert codes.dtype == np.float32
    for position in range(13):
        for n in range(3):
            angle = position / max_wavelength ** (2 * n / 6)
            assert codes[position, n] == pytest.approx(math.sin(angle), abs=2e-6)
            assert codes[position, 3 + n] == pytest.approx(math.cos(angle), abs=2e-6)


def test_a_position_does_not_depend_on_the_length():
    np.testing.assert_array_equal(sinusoidal_positions(5, 4), sinusoidal_positions(11, 4)[:5])


def test_every_position_differs():
    codes = np.asarray(sinusoidal_positions(101, 8))
    distances = np.linalg.norm(codes[:, None] - codes[None], axis=-1)
    assert np.min(distances[~np.eye(101, dtype=bool)]) > 0.1


def test_odd_sizes_are_refused():
    with pytest.raises(ValueError, match=r"dim must be even.*; got 7"):
        sinusoidal_positions(3, 7)


def test_codes_of_given_positions_known_or_traced():
    table = np.asarray(sinusoidal_positions(13, 6, max_wavelength=50.0))
    positions = jnp.array([11, 0, 7])
    codes = jax.jit(lambda positions: sinusoidal_codes(positions, 6, max_wavelength=50.0))
    np.testing.assert_allclose(codes(positions), table[np.array([11, 0, 7])], atol=1e-6)
    half = sinusoidal_codes(jnp.array([2.5]), 2)  # between positions
    np.testing.assert_allclose(half, [[math.sin(2.5), math.cos(2.5)]], atol=1e-6)
    with pytest.raises(ValueError, match=r"dim must be even.*; got 5"):
        sinusoidal_codes(positions, 5)


# --- rotations ---


@pytest.mark.parametrize("max_wavelength", [10_000.0, 50.0])
def test_rotary_is_the_formula(max_wavelength):
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    positions = [3, 0, 1, 11, 7]
    found = jax.jit(lambda *args: rotary(*args, max_wavelength=max_wavelength))(
        x, jnp.array(positions)
    )
    assert found.dtype == jnp.float32
    for row in range(2):
        for i, position in enumerate(positions):
            for n in range(3):
                angle = position / max_wavelength ** (2 * n / 6)
                turned = complex(x[row, i, n], x[row, i, 3 + n]) * complex(
                    math.cos(angle), math.sin(angle)
                )
                assert found[row, i, n] == pytest.approx(turned.real, abs=1e-5)
                assert found[row, i, 3 + n] == pytest.approx(turned.imag, abs=1e-5)


def test_dot_products_depend_on_the_distance_alone():
    with jax.enable_x64(True):
        query, key = np.random.default_rng(1).normal(size=(2, 1, 6))
        dots = {}
        for i in range(0, 23, 5):
            for j in range(0, 23, 3):
                left, right = (
                    np.asarray(rotary(x, jnp.array([at]), max_wavelength=50.0))
                    for x, at in ((query, i), (key, j))
                )
                dots.setdefault(j - i, []).append(float((left * right).sum()))
    assert any(len(same) > 1 for same in dots.values())
    for same in dots.values():
        assert same == pytest.approx([same[0]] * len(same), abs=1e-12)
    assert dots[0][0] == pytest.approx(float((query * key).sum()), abs=1e-12)
    assert np.std([same[0] for same in dots.values()]) > 0.1  # and on the distance it does


def test_rotary_keeps_dtypes_and_takes_angles_in_float32():
    x = jnp.ones((1, 4), jnp.bfloat16)
    found = rotary(x, jnp.array([1001]))
    assert found.dtype == jnp.bfloat16
    expected = [math.cos(angle) - math.sin(angle) for angle in (1001, 10.01)]
    expected += [math.cos(angle) + math.sin(angle) for angle in (1001, 10.01)]
    np.testing.assert_allclose(found[0].astype(jnp.float32), expected, atol=0.01)


def test_what_cannot_be_rotated():
    with pytest.raises(ValueError, match=r"x must have an even number of features .*; got 3"):
        rotary(jnp.ones((5, 3)), jnp.arange(5))
    with pytest.raises(ValueError, match=r"positions must be \[5\], or .*; got \[4\]"):
        rotary(jnp.ones((2, 5, 4)), jnp.arange(4))
