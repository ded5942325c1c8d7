"""Hundreds of small programs, all of them new: compiled quickly, in place of tests/conftest.py."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
