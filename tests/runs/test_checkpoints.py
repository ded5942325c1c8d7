"""Checkpoints: every bit, the newest and the best; damage is found, and an older state is used."""

import itertools
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mistakes import refused
from saved_files import assert_bits_equal, fsynced, snapshot

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.parameters_file import read_parameters, write_parameters
from attention_jax.training.saved import _params_digest


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
    for step in (1, 2):
        Checkpoints(folder).save(step, state(step), metric=float(step))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restored(folder, step="newest", like=state, **options):
    return Checkpoints(folder, **{"read_only": True, **options}).restore(jax.eval_shape(like), step)


def assert_good(folder, step):
    """The newest good state is that of `step`."""
    assert_bits_equal(restored(folder), state(step))


# --- every bit ---

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

    with jax.enable_x64(True):
        saved = {name: jnp.asarray(of_kind(name)) for name in KINDS}
        assert [str(leaf.dtype) for leaf in saved.values()] == list(KINDS)
        for impl in ("threefry2x32", "rbg"):
            saved[impl] = jax.random.split(jax.random.key(7, impl=impl), 3)
        saved["none"] = (jnp.ones((0, 3), jnp.bfloat16), jax.random.split(jax.random.key(0), 0))
        Checkpoints(tmp_path).save(1, saved)
        assert_bits_equal(restored(tmp_path, like=lambda: saved), saved)
        assert_bits_equal(Checkpoints(tmp_path).restore(saved), saved)


@pytest.mark.parametrize("name", ["[v1] *?", "in Latin-1: \udcff", "grün"])
def test_no_letter_in_the_name_of_a_folder_loses_an_array(tmp_path, name):
    folder = tmp_path / name / "checkpoints"
    Checkpoints(folder).save(1, state(1))
    assert_good(folder, 1)


def test_leaves_are_found_under_their_names_of_before(tmp_path):
    """In checkpoints, also one that is saved again, in files, and in the digest of all leaves."""

    def of_a_model(name):
        model = {"output": jnp.ones(2), name: {"v": jnp.zeros((0, 2))}, "value": jnp.ones(3)}
        return {"model": {0: model | {name: jnp.arange(5.0)}}, "moments": (model, None)}

    before, now = of_a_model("params"), of_a_model("params_of_score")
    write_parameters(tmp_path / "file.safetensors", before, {})
    assert_bits_equal(read_parameters(tmp_path / "file.safetensors", now)[0], now)
    assert _params_digest(now) == _params_digest(before)
    for saved in (before, now):
        Checkpoints(tmp_path).save(1, saved, metric=1.0)
        assert_bits_equal(Checkpoints(tmp_path).restore(now), now)


class Stepped(NamedTuple):
    step: Any


@pytest.mark.parametrize("inner", [{"a": {"b": 1}}, {"a": Stepped({"b": 1})}, {"a": {"b": [2]}}])
def test_two_leaves_with_one_name_are_refused(tmp_path, inner):
    """Orbax joins names by dots, and would write both to one file."""
    tree = jax.tree.map(jnp.asarray, {"a.b": 1, "a.b.0": 2, "a.step.b": 3, **inner})
    with pytest.raises(ValueError, match="'a"):
        Checkpoints(tmp_path).save(1, tree)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_leaf_that_orbax_cannot_write_is_one_error(folder):
    tree = {"x": jnp.ones(3, jnp.uint4)}
    refused("^checkpoint of step 3 could not be", lambda: Checkpoints(folder).save(3, tree))
    assert_good(folder, 2)


# --- which are kept ---


def test_a_temporary_one_makes_room_for_the_next(tmp_path):
    kept = []
    for step in range(7):  # each opening knows which are temporary
        checkpoints = Checkpoints(tmp_path, keep=2)
        checkpoints.save(step, state(step), temporary=step in (0, 3, 4))
        kept.append(checkpoints.steps())
    assert kept == [[0], [1], [1, 2], [2, 3], [2, 4], [2, 5], [5, 6]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6"]


def test_the_best_are_kept_beside_the_newest(tmp_path):
    metrics = [0.5, math.nan, 0.1, 0.1, 0.3, None, math.inf, 0.9, -math.inf]
    for step, metric in enumerate(metrics):  # each opening knows what is best
        checkpoints = Checkpoints(tmp_path, keep=2, keep_best=2)
        checkpoints.save(step, state(step), metric=metric)
        seen = [
            (value, -earlier)
            for earlier, value in enumerate(metrics[: step + 1])
            if value is not None and math.isfinite(value)
        ]
        best = [-negative for _, negative in sorted(seen)]
        assert checkpoints.steps() == sorted({*range(step + 1)[-2:], *best[:2]})
        assert checkpoints.best_step() == best[0]
    for step, name in ((3, "best"), (8, "newest"), (2, 2), (7, 7)):
        assert_bits_equal(restored(tmp_path, name), state(step))
    for missing in (6, -1):
        with pytest.raises(ValueError, match=rf"best or one of 0, 2, 3, 7, 8; got {missing}"):
            restored(tmp_path, missing)


def test_no_best_is_one_line(tmp_path):
    Checkpoints(tmp_path).save(1, {"w": jnp.ones(3)}, metric=math.nan)
    message = r"newest or one of 0, 1; got best; no checkpoint has a finite metric$"
    refused(message, lambda: restored(tmp_path, "best"))


# --- a save that is seen, killed or refused ---


def test_a_step_gets_its_name_when_all_of_it_is_on_disk(folder, monkeypatch):
    on_disk, rename = fsynced(monkeypatch), os.rename

    def checked_rename(old, new):
        if Path(new).name == "3":
            files = [path for path in Path(old).rglob("*") if path.is_file()]
            assert len(files) > 3
            assert all(map(on_disk, files))
            assert_good(folder, 2)  # what others see meanwhile
        rename(old, new)

    monkeypatch.setattr(os, "rename", checked_rename)
    Checkpoints(folder).save(3, state(3))
    assert_good(folder, 3)


def test_a_step_that_is_saved_again_is_written_once(folder):
    checkpoints = Checkpoints(folder, keep=2)
    files = {path: path.stat().st_mtime_ns for path in (folder / "2" / "state").rglob("*")}
    checkpoints.save(2, state(2), metric=0.5)
    assert checkpoints.steps() == [1, 2]
    assert Checkpoints(folder, read_only=True).best_step() == 2
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert_good(folder, 2)
    before = snapshot(folder)
    checkpoints.save(2, state(2), metric=0.5)
    other = lambda: checkpoints.save(2, {"w": jnp.ones(3)})  # noqa: E731
    refused(r"step 2 could not be saved .* kept already, but count was int32", other)
    assert snapshot(folder) == before


def test_a_step_that_an_earlier_version_was_replacing_is_kept(folder):
    """It was renamed, and the process killed before its successor got its name."""
    shutil.copytree(folder / "2", folder / "2.partial")
    (folder / "2").rename(folder / "2.replaced.partial")
    assert Checkpoints(folder).steps() == [1, 2]
    assert_good(folder, 2)
    assert {path.name for path in folder.iterdir()} == {"1", "2"}


def test_a_full_disk_is_one_error_and_a_deletion_that_fails_one_warning(
    folder, monkeypatch, capsys
):
    def fails(*_):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(folder)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fails)
        checkpoints.save(3, state(3))
    assert "step 1, which is no longer kept, could not be deleted" in capsys.readouterr().err
    assert checkpoints.steps() == [2, 3]
    monkeypatch.setattr(os, "fsync", fails)
    refused("step 4 .* No space left on device; the", lambda: checkpoints.save(4, state(4)))
    assert_good(folder, 3)


# --- damage ---


def flipped(content, place):
    changed = bytearray(content)
    changed[place] ^= 0x04
    return bytes(changed)


# A file's new contents.
DAMAGES = (
    lambda content: content[: len(content) // 2],
    lambda content: flipped(content, 0),
    lambda content: flipped(content, len(content) // 2),
    lambda content: flipped(content, -1),
)


def test_damage_of_any_file_is_found(folder, capsys):
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
    assert len(files) > 5
    for path, damage in zip(files, itertools.cycle(DAMAGES), strict=False):
        content = path.read_bytes()
        path.write_bytes(damage(content))
        assert_good(folder, 1)
        printed = capsys.readouterr().err
        assert printed.startswith("warning: the checkpoint of step 2 is damaged ("), path
        assert printed.endswith("; that of step 1 is used\n")
        assert printed.count("\n") == 1
        path.write_bytes(content)
    assert_good(folder, 2)
    assert capsys.readouterr().err == ""
    shutil.rmtree(folder / "2" / "state")
    assert_good(folder, 1)


def test_strays_hide_no_state(folder, capsys):
    (folder / "3").mkdir()
    shutil.copytree(folder / "1", folder / "7")
    for name in ("old", "007", "-1", "2.orbax-checkpoint-tmp", "²"):
        shutil.copytree(folder / "1", folder / name)
    (folder / "notes.txt").write_text("mine")
    (folder / "2" / "notes.txt").write_text("mine")
    assert_good(folder, 2)
    assert "of step 7 is damaged (it was saved as step 1)" in capsys.readouterr().err


def test_all_are_damaged_or_the_one_that_is_asked_for(folder):
    path = folder / "2" / "manifest.json"
    path.write_text(path.read_text().replace('"metric": 2.0', '"metric": 0.0'))
    assert Checkpoints(folder, read_only=True).best_step() == 1
    with pytest.raises(ValueError, match=r"can be used: step 2: manifest.json has changed\. "):
        restored(folder, 2)
    assert_bits_equal(restored(folder, 1), state(1))
    (folder / "1" / "manifest.json").write_text("{}")
    before = snapshot(folder)
    message = "step 2: manifest.* changed; step 1: man"
    refused(message, lambda: restored(folder, read_only=False))
    assert snapshot(folder) == before


def test_a_trainer_sets_damaged_steps_aside_and_goes_on(folder, capsys):
    aside = folder.with_name("damaged_checkpoints")
    for index in (0, 1):  # the same step may be damaged twice
        (folder / "2" / "manifest.json").write_text("{}")
        before = snapshot(folder / "2")
        checkpoints = Checkpoints(folder)
        found = checkpoints.restore(state())
        assert f"and was moved to {aside}; that of step 1 is used" in capsys.readouterr().err
        assert snapshot(aside / f"2.{index}") == before
        assert checkpoints.steps() == [1]
        checkpoints.save(2, found)
        assert_bits_equal(restored(folder), state(1))
    assert sorted(path.name for path in aside.iterdir()) == ["2.0", "2.1"]


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
    with pytest.raises(ValueError, match=f"{folder / '2'} is of another configuration: {message}"):
        restored(folder, like=lambda: {**state(), **changed}, read_only=False)
    assert snapshot(folder) == before
