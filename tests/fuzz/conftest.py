"""Replaces the setting of tests/conftest.py: hundreds of small new programs compile quickly."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
