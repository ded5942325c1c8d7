"""How kernels run on this CPU, and are compiled for what is not here."""

import jax
import pytest
from kernel_cases import runnable


@pytest.fixture
def interpreted(request):
    """The implementation `NAME` of the module computes on this CPU."""
    with runnable(request.module.NAME):
        yield


@pytest.fixture(autouse=True)
def _optimised(request):
    """Options of XLA:CPU for quick compilation are unknown to the compilers of accelerators."""
    before = jax.config.read("jax_disable_most_optimizations")
    if request.node.get_closest_marker("accelerators"):
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
