"""Checkpoints: every bit, the newest and the best; damage is found, and an older state is used."""

import math
import os
import shutil
from pathlib import Path

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
        "params": {"kernel": jnp.array(rng.normal(size=(31, 17)), jnp.float32), "empty": {}},
        "layers": {0: jnp.array(rng.normal(size=7), jnp.bfloat16)},
        "moments": (jnp.array([np.nan, np.inf, -0.0, 1e-45], jnp.float32), None),
        "key": jax.random.key(seed),
        "count": jnp.array(seed, jnp.int32),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the states of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), metric=float(step))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restored(folder, **options):
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.restore(jax.eval_shape(state), **options)


def assert_good(folder, step):
    """The newest good state is that of `step`; returns the damage to newer ones."""
    found, restored_state, damaged = restored(folder)
    assert found == step
    assert_bits_equal(restored_state, state(step))
    assert all(damaged.values())
    return damaged


# --- every bit ---


def test_every_leaf_comes_back_bit_by_bit(tmp_path):
    with Checkpoints(tmp_path / "a" / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() is checkpoints.best_step() is None
        assert checkpoints.restore(state()) is None
        checkpoints.save(3, state(3))
        assert checkpoints.latest_step() == 3
        assert_bits_equal(checkpoints.restore(state(0)).state, state(3))
    assert assert_good(tmp_path / "a" / "checkpoints", 3) == {}


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
        checkpoints.save(1, saved)
        assert_bits_equal(checkpoints.restore(jax.eval_shape(lambda: saved)).state, saved)


def test_leaves_of_size_0_come_back(tmp_path):
    saved = {
        **state(3),
        "none": (
            jnp.ones((0, 3), jnp.bfloat16),
            {"no_keys": jax.random.split(jax.random.key(0), 0)},
        ),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        for like in (saved, jax.eval_shape(lambda: saved)):
            assert_bits_equal(checkpoints.restore(like).state, saved)
        with pytest.raises(ValueError, match=r"none\.0 was bfloat16\[0, 3\], now float32\[0, 2\]"):
            checkpoints.restore({**saved, "none": (jnp.ones((0, 2)), saved["none"][1])})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_leaf_that_orbax_cannot_write_is_one_error(folder):
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(ValueError, match=r"^checkpoint of step 3 could not be saved in .+") as error,
    ):
        checkpoints.save(3, {"x": jnp.ones(3, jnp.uint4)})
    assert "\n" not in str(error.value)
    assert assert_good(folder, 2) == {}


# --- which are kept ---


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 10):
            checkpoints.save(step, state(step))
            assert checkpoints.latest_step() == step
        assert checkpoints.best_step() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "4"]


def test_a_temporary_one_makes_room_for_the_next(tmp_path):
    kept = []
    for step in range(7):  # each opening knows which are temporary
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            checkpoints.save(step, state(step), temporary=step in (0, 3, 4))
            kept.append(checkpoints.steps())
    assert kept == [[0], [1], [1, 2], [2, 3], [2, 4], [2, 5], [5, 6]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]


def test_the_best_are_kept_beside_the_newest(tmp_path):
    metrics = [0.5, math.nan, 0.1, 0.1, 0.3, None, math.inf, 0.9, -math.inf]
    for step, metric in enumerate(metrics):  # each opening knows what is best
        with Checkpoints(tmp_path, keep=2, keep_best=2) as checkpoints:
            checkpoints.save(step, state(step), metric=metric)
            seen = [
                (value, -earlier)
                for earlier, value in enumerate(metrics[: step + 1])
                if value is not None and math.isfinite(value)
            ]
            best = [-negative for _, negative in sorted(seen)]
            assert checkpoints.steps() == sorted({*range(step + 1)[-2:], *best[:2]})
            assert checkpoints.best_step() == best[0]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 3, 7, 8]
        assert checkpoints.step_called("newest") is None
        assert checkpoints.step_called("best") == 3
        assert checkpoints.step_called(7) == 7
        for missing in (6, -1):
            with pytest.raises(ValueError, match=rf"one of 2, 3, 7, 8; got {missing}"):
                checkpoints.step_called(missing)
    for step in (2, 3, 7, 8):
        found, restored_state, damaged = restored(tmp_path, step=step)
        assert (found, damaged) == (step, {})
        assert_bits_equal(restored_state, state(step))


# --- a save that is seen, killed or refused ---


class Killed(BaseException):
    pass


def test_a_step_gets_its_name_when_all_of_it_is_on_disk(folder, monkeypatch):
    on_disk, fsync, rename = {}, os.fsync, os.rename

    def recorded_fsync(file):
        fsync(file)
        on_disk[os.fstat(file).st_ino] = os.fstat(file).st_size

    def checked_rename(old, new):
        if Path(new).name == "3":
            files = [path for path in Path(old).rglob("*") if path.is_file()]
            assert len(files) > 3
            assert all(on_disk[path.stat().st_ino] == path.stat().st_size for path in files)
            assert assert_good(folder, 2) == {}  # what others see meanwhile
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", checked_rename)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state(3))
    assert assert_good(folder, 3) == {}


@pytest.mark.parametrize(("place", "newest"), [((os, "rename"), 2), ((shutil, "rmtree"), 3)])
def test_a_killed_save_or_deletion_is_cleared_up_by_the_next_trainer(
    folder, monkeypatch, place, newest
):
    original = getattr(*place)

    def kill(path, *others):
        if {"1.partial", "3.partial"} & {Path(path).name}:
            raise Killed
        original(path, *others)

    with Checkpoints(folder) as checkpoints, monkeypatch.context() as patched:
        patched.setattr(*place, kill)
        with pytest.raises(Killed):
            checkpoints.save(3, state(3))
    before = snapshot(folder)
    assert any("partial" in name for name in before)
    assert assert_good(folder, newest) == {}
    assert snapshot(folder) == before  # who only reads changes nothing
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(4, state(4))
    assert {path.name for path in folder.iterdir()} == {str(newest), "4"}


def test_a_write_that_fails_is_one_error_and_the_old_state_stays(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Checkpoints(folder) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(ValueError, match=r"step 3 .* No space left on device; the") as told:
                checkpoints.save(3, state(3))
        assert "\n" not in str(told.value)
        assert assert_good(folder, 2) == {}
        checkpoints.save(3, state(3))
    assert assert_good(folder, 3) == {}


def test_a_deletion_that_fails_is_a_warning(folder, monkeypatch, capsys):
    def refused(*_):
        raise OSError(13, "Permission denied")

    with Checkpoints(folder) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", refused)
            checkpoints.save(3, state(3))
        assert "step 1, which is no longer kept, could not be deleted" in capsys.readouterr().err
        assert checkpoints.steps() == [2, 3]
    assert assert_good(folder, 3) == {}


# --- a reader while a trainer saves ---


def test_a_reader_lists_the_steps_again_when_they_are_gone(folder):
    with Checkpoints(folder, read_only=True) as reader:
        with Checkpoints(folder) as trainer:
            for step in (3, 4):
                trainer.save(step, state(step))
        step, found, damaged = reader.restore(state())
        assert (step, damaged, reader.steps()) == (4, {}, [3, 4])
        assert_bits_equal(found, state(4))


@pytest.mark.parametrize("lost", ["2", "2/state", "2/state/_METADATA", "2/state/d"])
def test_a_state_that_is_deleted_after_its_check(folder, monkeypatch, lost):
    original = Checkpoints._state

    def deleted_before(self, step, like):
        if step == 2:
            (folder / lost).rename(folder / "gone")
        return original(self, step, like)

    monkeypatch.setattr(Checkpoints, "_state", deleted_before)
    damaged = assert_good(folder, 1)
    assert list(damaged) == ([] if lost == "2" else [2])
    assert "\n" not in "".join(damaged.values())


# --- damage ---


def damages(content):
    """{what: the file's new content, or None for a deleted file}."""

    def flipped(place):
        changed = bytearray(content)
        changed[place] ^= 0x04
        return bytes(changed)

    middle, last = len(content) // 2, len(content) - 1
    return {
        "missing": None,
        "cut": content[:middle],
        "one bit of the first byte": flipped(0),
        "one bit in the middle": flipped(middle),
        "one bit of the last byte": flipped(last),
    }


def test_damage_of_any_file_is_found(folder):
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for what, damaged in damages(content).items():
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            assert list(assert_good(folder, 1)) == [2], (path, what)
        path.write_bytes(content)
    assert assert_good(folder, 2) == {}


@pytest.mark.parametrize("path", ["2", "2/state"])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_missing_or_empty_folder(folder, path, emptied):
    shutil.rmtree(folder / path)
    if emptied:
        (folder / path).mkdir()
    assert list(assert_good(folder, 1)) == ([] if path == "2" and not emptied else [2])


def test_strays_hide_no_state(folder):
    (folder / "3").mkdir()
    shutil.copytree(folder / "1", folder / "7")
    for name in ("old", "007", "-1", "2.orbax-checkpoint-tmp", "²"):
        shutil.copytree(folder / "1", folder / name)
    (folder / "notes.txt").write_text("mine")
    (folder / "2" / "notes.txt").write_text("mine")
    damaged = assert_good(folder, 2)
    assert list(damaged) == [7, 3]
    assert damaged[7] == "it was saved as step 1"


def test_all_damaged(folder):
    for step in (1, 2):
        (folder / str(step) / "manifest.json").write_text("{}")
    before = snapshot(folder)
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.best_step() is None
        with pytest.raises(ValueError, match=r"no checkpoint in .+ can be used") as told:
            checkpoints.restore(state())
    assert "step 2: manifest.json has changed; step 1: manifest.json" in str(told.value)
    assert "\n" not in str(told.value)
    assert snapshot(folder) == before


def test_the_step_that_is_asked_for_is_damaged(folder):
    path = folder / "2" / "manifest.json"
    path.write_text(path.read_text().replace('"metric": 2.0', '"metric": 0.0'))
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.best_step() == 1
        with pytest.raises(ValueError, match=r"step 2: manifest.json has changed") as told:
            checkpoints.restore(state(), step=2)
        assert "step 1" not in str(told.value)
        assert_bits_equal(checkpoints.restore(state(), step=1).state, state(1))


def test_damaged_steps_are_set_aside_and_training_goes_on(folder):
    for index in (0, 1):  # the same step may be damaged twice
        (folder / "2" / "manifest.json").write_text("{}")
        before = snapshot(folder / "2")
        with Checkpoints(folder) as checkpoints:
            step, found, damaged = checkpoints.restore(state())
            assert (step, list(damaged)) == (1, [2])
            aside = checkpoints.set_aside(damaged)
            assert aside == folder.with_name("damaged_checkpoints")
            assert snapshot(aside / f"2.{index}") == before
            assert checkpoints.steps() == [1]
            checkpoints.save(2, found)
        assert_bits_equal(restored(folder).state, state(1))
    assert sorted(path.name for path in aside.iterdir()) == ["2.0", "2.1"]


# --- whole, but of something else ---


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"count": jnp.zeros(5, jnp.int32)}, r"count was int32\[\], now int32\[5\]"),
        ({"count": jnp.zeros(())}, r"count was int32\[\], now float32\[\]"),
        ({"key": jax.random.key(0, impl="rbg")}, r"key was key<fry>\[\], now key<rbg>\[\]"),
        ({"more": jnp.zeros(3)}, r"more was nothing, now float32\[3\]"),
        ({"count": None}, r"count was int32\[\], now nothing"),
    ],
)
def test_another_configuration_is_an_error_and_not_damage(folder, changed, message):
    before = snapshot(folder)
    with Checkpoints(folder, read_only=True) as checkpoints:
        with pytest.raises(ValueError, match=message) as told:
            checkpoints.restore({**state(), **changed})
        assert f"{folder / '2'} is of another configuration" in str(told.value)
    assert snapshot(folder) == before
