"""Meshes: what they refuse; on eight devices, what is the same, what is cut up, what is sent."""

import eight_devices
import jax
import numpy as np
import pytest
import sharding_checks

from attention_jax.training.sharding import Layout, MeshShape, whole_machine

# --- on eight devices ---


@pytest.fixture(scope="module")
def results(request):
    return eight_devices.results_of(sharding_checks, request)


# `filled_up_batches_do_not_change_the_program` trains on batches from the host, too.
SLOW = {*sharding_checks.SLOW, "fed_trains_as_one_device_does"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in (*sharding_checks.CHECKS, *sharding_checks.SLOW)
    ],
)
def test_on_eight_devices(name, results):
    assert results[name] is None, results[name]


# --- on one ---


def test_words():
    shape = MeshShape(seed=3, data=2)
    assert MeshShape.from_words(["data=2", "seed=3"]) == shape
    assert MeshShape.from_words(shape.to_words()) == shape
    assert shape.devices == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=2"], "seed=DEVICES, data=DEVICES; got 'model=2'"),
        ([], "got ''"),
        (["data="], "got 'data='"),
        (["data=-2"], "got 'data=-2'"),
        (["data=2", "data=4"], "got 'data=4'"),
        (["data=0"], "mesh data must be at least 1; got 0"),
    ],
)
def test_bad_words(words, message):
    with pytest.raises(ValueError, match=r"^mesh ") as told:
        MeshShape.from_words(words)
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("shape", "devices", "processes", "message"),
    [
        (MeshShape(data=7), 6, 1, "mesh seed=1 data=7 needs 7 devices; there are 6"),
        (MeshShape(data=2), 6, 3, "must take all 6 devices of the 3 processes; it takes 2"),
        (MeshShape(seed=3), 6, 1, "mesh seed must divide the 4 seeds; got 3"),
        (MeshShape(data=3), 6, 1, "must divide the batch of 10; got 3"),
    ],
)
def test_what_cannot_be_cut_up(monkeypatch, shape, devices, processes, message):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(ValueError, match=r"^mesh ") as told:
        shape.check(seeds=4, batch_size=10)
    assert message in str(told.value)
    MeshShape(data=2, seed=2 if processes == 1 else 3).check(seeds=12, batch_size=10)
    assert whole_machine() == MeshShape(data=1 if processes == 1 else devices)


def test_one_device_is_left_alone():
    layout = Layout()
    state = {"w": np.ones((3, 5), np.float32)}
    assert layout.constrained(state)["w"] is state["w"]
    assert layout.constrained(state, "data")["w"] is state["w"]
    assert layout.by_seed.device_set == {jax.devices()[0]}
    np.testing.assert_array_equal(layout.to_host(jax.numpy.ones(3)), np.ones(3))
