"""Meshes with Auto and Explicit axes, and `shard_map`: equal results; no loop sends anything."""

import eight_devices
import mesh_checks
import pytest


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(mesh_checks, request)


@pytest.mark.parametrize(
    "name",
    [
        *mesh_checks.CHECKS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in mesh_checks.SLOW),
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]
