"""Sinusoidal positions against a loop over the formula."""

import math

import numpy as np
import pytest

from attention_jax.nn.positions import sinusoidal_positions


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
