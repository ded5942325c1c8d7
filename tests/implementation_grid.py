"""Test cases for every portable implementation, of which some are slow with tiles."""

import pytest

from attention_jax.implementations import PORTABLE


def grid(name, values, slow_in_tiles):
    """Parametrises a test by every portable implementation and every value of the argument `name`.

    A tile loop compiles longer than the reference does: its cases in `slow_in_tiles` are slow.
    """
    return pytest.mark.parametrize(
        ("implementation", name),
        [
            pytest.param(
                implementation,
                value,
                id=f"{implementation}-{value}",
                marks=[pytest.mark.slow] * (implementation == "tiled" and value in slow_in_tiles),
            )
            for implementation in PORTABLE
            for value in values
        ],
    )
