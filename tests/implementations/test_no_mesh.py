"""Several devices and no mesh: every score, eager and jitted, as on one device."""

import eight_devices
import no_mesh_checks
import pytest


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(no_mesh_checks, request)


@pytest.mark.parametrize(
    "name",
    [
        *no_mesh_checks.CHECKS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in no_mesh_checks.SLOW),
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]
