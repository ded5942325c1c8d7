"""Modules on a mesh with Explicit axes, the kind that `jax.make_mesh` makes."""

import eight_devices
import explicit_module_checks
import pytest


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(explicit_module_checks, request)


@pytest.mark.parametrize(
    "name",
    [
        *explicit_module_checks.CHECKS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in explicit_module_checks.SLOW),
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]
