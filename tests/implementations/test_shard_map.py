"""`jax.shard_map` with its default checks, on eight devices: the batch is cut up."""

import eight_devices
import pytest
import shard_map_checks


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(shard_map_checks, request)


@pytest.mark.parametrize("name", shard_map_checks.CHECKS)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]
