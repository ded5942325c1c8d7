"""Derivatives of every score, mask and option, in tiles and in a ring; and on meshes."""

import derivative_grid
import eight_devices
import pytest


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(derivative_grid, request)


@pytest.mark.parametrize(
    "name",
    [
        *derivative_grid.CHECKS,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*derivative_grid.SLOW, *derivative_grid.SAMPLE)
        ),
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]
