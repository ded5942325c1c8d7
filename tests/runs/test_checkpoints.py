"""Saving and restoring: every bit, the newest and the best, on any machine, or one clear error."""

import collections
import json
import math
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from saved_files import assert_bits_equal, snapshot

from attention_jax.runs.checkpoints import Checkpoints


def state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "params": {"kernel": jnp.array(rng.normal(size=(3, 5, 2)), jnp.float32), "empty": {}},
        "layers": {0: jnp.array(rng.normal(size=7), jnp.bfloat16)},
        "moments": (jnp.array([np.nan, np.inf, -0.0, 1e-45], jnp.float32), None),
        "key": jax.random.key(seed),
        "nothing": jnp.zeros((0, 3), jnp.int8),
        "count": jnp.array(seed, jnp.int32),
    }


# --- every bit ---


def test_every_leaf_comes_back_bit_by_bit(tmp_path):
    with Checkpoints(tmp_path / "a" / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() is checkpoints.best_step() is None
        assert checkpoints.restore(state()) is None
        checkpoints.save(3, state(3))
        checkpoints.wait()
        assert_bits_equal(checkpoints.restore(state(0)).state, state(3))
    with Checkpoints(tmp_path / "a" / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() == 3
        step, restored, damaged = checkpoints.restore(jax.eval_shape(lambda: state(0)))
        assert (step, damaged) == (3, {})
        assert_bits_equal(restored, state(3))


KINDS = (
    "bool", "int2", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
    "uint64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    "float4_e2m1fn", "complex64", "complex128",
)  # fmt: skip
NARROW = {"bool": 1, "int2": 2, "int4": 4, "float4_e2m1fn": 4}  # bits


def test_every_kind_of_leaf_comes_back_bit_by_bit(tmp_path):
    rng = np.random.default_rng(5)

    def of_kind(name):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        if name.startswith("int") and name in NARROW:
            return rng.integers(-(2 ** NARROW[name] // 2), 2 ** NARROW[name] // 2, 7).astype(dtype)
        raw = rng.integers(0, 256, 7 * dtype.itemsize, np.uint8)
        return (raw & 2 ** NARROW.get(name, 8) - 1).view(dtype)

    with jax.enable_x64(True), Checkpoints(tmp_path) as checkpoints:
        saved = {name: jnp.asarray(of_kind(name)) for name in KINDS}
        assert [str(leaf.dtype) for leaf in saved.values()] == list(KINDS)
        for impl in ("threefry2x32", "rbg"):
            saved[impl] = jax.random.split(jax.random.key(7, impl=impl), 3)
        saved |= {"scalar": jnp.float32(-0.0), "empty": jnp.zeros((3, 0), jnp.float64)}
        checkpoints.save(1, saved)
        checkpoints.wait()
        assert_bits_equal(checkpoints.restore(jax.eval_shape(lambda: saved)).state, saved)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_kind_that_orbax_cannot_write_is_one_error(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)})
        checkpoints.wait()
        match = r"step 2 could not be saved .*: .*\buint4\b"
        with pytest.raises(ValueError, match=match):  # noqa: PT012
            checkpoints.save(2, {"x": jnp.ones(3, jnp.uint4)})
            checkpoints.wait()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]


def test_restores_what_another_machine_saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))
    # As if on a GPU that is not here: Orbax notes for each leaf where it lived.
    (path,) = tmp_path.glob("1/state/_sharding")
    shardings = json.loads(path.read_text())
    assert shardings
    assert all("cpu:0" in sharding for sharding in shardings.values())
    path.write_text(path.read_text().replace("cpu:0", "cuda:3"))
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(jax.eval_shape(state)).state, state(1))


# --- which are kept ---


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 10):
            checkpoints.save(step, state(step))
            assert checkpoints.latest_step() == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "4"]
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(state()).state, state(10))
        assert checkpoints.best_step() is None


def test_the_best_are_kept_beside_the_newest(tmp_path):
    metrics = [0.5, math.nan, 0.1, 0.1, 0.3, None, math.inf, 0.9, -math.inf]
    for step, metric in enumerate(metrics):  # one opening each: what is best is known again
        with Checkpoints(tmp_path, keep=2, keep_best=2) as checkpoints:
            checkpoints.save(step, state(step), metric=metric)
            checkpoints.wait()
            seen = [
                (value, -earlier)
                for earlier, value in enumerate(metrics[: step + 1])
                if value is not None and math.isfinite(value)
            ]
            best = [-negative for _, negative in sorted(seen)]
            assert checkpoints.steps() == sorted({*range(step + 1)[-2:], *best[:2]})
            assert checkpoints.best_step() == best[0]
    assert best[:2] == [3, 2]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 3, 7, 8]
        assert checkpoints.step_called("newest") is None
        assert checkpoints.step_called("best") == 3
        assert checkpoints.step_called(7) == 7
        for missing in (6, -1):
            with pytest.raises(ValueError, match=rf"one of 2, 3, 7, 8; got {missing}"):
                checkpoints.step_called(missing)
        for step in (2, 3, 7, 8):
            found, restored, damaged = checkpoints.restore(state(), step=step)
            assert (found, damaged) == (step, {})
            assert_bits_equal(restored, state(step))


# --- while training goes on ---


@pytest.fixture
def held(monkeypatch):
    """Orbax puts nothing in its place until this event is set."""
    event, rename = threading.Event(), os.rename

    def wait_and_rename(*paths):
        assert event.wait(10)
        rename(*paths)

    monkeypatch.setattr(os, "rename", wait_and_rename)
    yield event
    event.set()


def test_training_goes_on_while_a_state_is_written(tmp_path, held):
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    big = {"x": jnp.arange(1_000_003, dtype=jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, big)
        assert not (tmp_path / "1").exists()
        for _ in range(3):  # buffers are given back and used again, under the save
            big = spoil(big)
        assert big["x"][7] == -1
        held.set()
        checkpoints.wait()
        assert (tmp_path / "1").is_dir()
        restored = checkpoints.restore(jax.eval_shape(lambda: big)).state
    np.testing.assert_array_equal(restored["x"], np.arange(1_000_003, dtype=np.float32))


def test_what_was_begun_is_saved_when_an_exception_passes(tmp_path):
    def interrupted():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(5, state(5))
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        interrupted()
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(state()).state, state(5))


def test_who_looks_on_while_a_state_is_written_sees_the_one_before(tmp_path, held):
    held.set()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        held.clear()
        checkpoints.save(2, state(2))
        with Checkpoints(tmp_path, read_only=True) as onlooker:
            assert onlooker.steps() == [1]
            assert_bits_equal(onlooker.restore(state()).state, state(1))
        held.set()
        checkpoints.wait()
        assert_bits_equal(checkpoints.restore(state()).state, state(2))


def test_what_a_killed_save_left_is_removed_by_who_trains_alone(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    before = snapshot(tmp_path)
    with Checkpoints(tmp_path, read_only=True) as onlooker:
        assert onlooker.steps() == [1]
        assert_bits_equal(onlooker.restore(state()).state, state(1))
    assert snapshot(tmp_path) == before
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    with Checkpoints(tmp_path) as checkpoints:
        assert_bits_equal(checkpoints.restore(state()).state, state(2))


# --- a full disk ---

Usage = collections.namedtuple("Usage", "total used free")


def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    big = {"x": jnp.zeros(10 * 2**18)}  # 10 MiB
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, big)
        checkpoints.wait()
        before = snapshot(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 11 * 2**20))
        with pytest.raises(ValueError, match=r"needs about 12.0 MiB and the disk has 11.0") as told:
            checkpoints.save(2, big)
        assert "checkpoint of step 2 could not be saved" in str(told.value)
        assert "\n" not in str(told.value)
        assert snapshot(tmp_path) == before
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 0, 13 * 2**20))
        checkpoints.save(2, big)
        checkpoints.wait()
        assert checkpoints.restore(big).step == 2


@pytest.mark.parametrize("then", ["wait", "save"])
def test_a_write_that_fails_is_one_error_and_the_old_state_stays(tmp_path, monkeypatch, then):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", full)
            with pytest.raises(ValueError, match="No space left on device") as told:  # noqa: PT012
                checkpoints.save(2, state(2))
                checkpoints.wait() if then == "wait" else checkpoints.save(3, state(3))
        assert str(told.value).startswith("checkpoint of step ")
        assert "\n" not in str(told.value)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert_bits_equal(checkpoints.restore(state()).state, state(1))
        checkpoints.save(2, state(2))
        checkpoints.wait()
        assert_bits_equal(checkpoints.restore(state()).state, state(2))
