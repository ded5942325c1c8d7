"""Test cases for every implementation, of which some are slow with tiles."""

import pytest

from attention_jax.implementations import IMPLEMENTATIONS


def grid(name, values, slow_in_tiles):
    """Parametrises a test by every implementation and every value of the argument `name`.

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
            for implementation in IMPLEMENTATIONS
            for value in values
        ],
    )
