"""Damaged checkpoints: the bits that were saved, or a step before and a word about it."""

import collections
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_files import assert_bits_equal, snapshot

from attention_jax.runs.checkpoints import Checkpoints, DamagedError

# Reads that Orbax abandons may be collected long after.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.array(rng.normal(size=(31, 17)), jnp.float32),  # too large for an index
        "bias": jnp.array(rng.normal(size=7), jnp.bfloat16),
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


def restored(folder):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(jax.eval_shape(state))


# --- any damage of any file ---


def damages(content):
    """{what: the file's new content, or None for none at all}."""

    def flipped(place):
        changed = bytearray(content)
        changed[place] ^= 0x04
        return bytes(changed)

    middle, last = len(content) // 2, len(content) - 1
    return {
        "missing": None,
        "cut": content[:middle],
        "zeros": bytes(len(content)),
        "one bit of the first byte": flipped(0),
        "one bit in the middle": flipped(middle),
        "one bit of the last byte": flipped(last),
    }


@pytest.mark.parametrize(
    "kinds",
    [
        ("cut", "one bit in the middle"),
        pytest.param(
            ("missing", "zeros", "one bit of the first byte", "one bit of the last byte"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_damage_of_any_file_is_seen_or_changes_nothing(saved, tmp_path, kinds):
    outcomes = collections.defaultdict(set)  # the steps restored, by file
    for path in sorted(path for path in (saved / "2").rglob("*") if path.is_file()):
        name = str(path.relative_to(saved / "2"))
        damaged_contents = damages(path.read_bytes())
        for what in kinds:
            content = damaged_contents[what]
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            copy = shutil.copytree(saved, tmp_path / "copy") / path.relative_to(saved)
            copy.unlink() if content is None else copy.write_bytes(content)
            step, found, damaged = restored(tmp_path / "copy")
            assert_bits_equal(found, state(step))
            assert list(damaged) == ([] if step == 2 else [2]), (name, what)
            assert all(damaged.values())
            outcomes[name].add(step)
    # Of what was seen to be damaged: the record, the state's index, the kernel's own 2,108 bytes.
    # More of a step's files Orbax writes and does not read again.
    kernel = [path for path in (saved / "2").glob("state/**/d/*") if path.stat().st_size > 2000]
    assert kernel
    for path in kernel:
        assert 1 in outcomes[str(path.relative_to(saved / "2"))]
    assert 1 in outcomes["state/_METADATA"]
    assert outcomes["state/manifest.ocdbt"] == outcomes["record/metadata"] == {1}
    assert {2} in outcomes.values()


@pytest.mark.parametrize("path", ["2", "2/record", "2/state"])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_missing_or_empty_folder(folder, path, emptied):
    shutil.rmtree(folder / path)
    if emptied:
        (folder / path).mkdir()
    step, found, damaged = restored(folder)
    assert step == 1
    assert_bits_equal(found, state(1))
    assert list(damaged) == ([] if path == "2" and not emptied else [2])


def test_a_stray_folder_of_a_step(folder):
    (folder / "3").mkdir()
    step, found, damaged = restored(folder)
    assert (step, list(damaged)) == (2, [3])
    assert_bits_equal(found, state(2))


def reseal(folder, change):
    """Changes a record behind its seal's back."""
    path = folder / "record" / "metadata"
    record = json.loads(path.read_text())
    record.pop("seal")
    change(record)
    text = json.dumps(record, sort_keys=True)
    path.write_text(json.dumps({**record, "seal": hashlib.sha256(text.encode()).hexdigest()}))


def test_bits_that_orbax_itself_does_not_miss(folder):
    """A state that is whole, but not the one that was recorded."""
    reseal(folder / "2", lambda record: None)
    assert restored(folder).step == 2
    shutil.rmtree(folder / "2" / "state")
    shutil.copytree(folder / "1" / "state", folder / "2" / "state")
    step, found, damaged = restored(folder)
    assert step == 1
    assert_bits_equal(found, state(1))
    assert damaged == {2: "4 of 4 leaves changed, bias among them"}


def test_a_step_under_the_name_of_another(folder):
    shutil.copytree(folder / "1", folder / "3")
    step, _, damaged = restored(folder)
    assert (step, damaged) == (2, {3: "it was saved as step 1"})


# --- when nothing is left ---


def test_all_damaged(folder):
    for step in (1, 2):
        (folder / str(step) / "record" / "metadata").write_text("{}")
    before = snapshot(folder)
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.best_step() is None
        with pytest.raises(DamagedError) as told:
            checkpoints.restore(state())
    message = str(told.value)
    assert "\n" not in message
    assert message.startswith(f"no checkpoint in {folder} can be used: step 2: its record")
    assert "; step 1: its record" in message
    assert snapshot(folder) == before


def test_the_one_asked_for_is_damaged(folder):
    (folder / "2" / "state" / "manifest.ocdbt").unlink()
    with Checkpoints(folder, read_only=True) as checkpoints:
        with pytest.raises(DamagedError, match="step 2: NOT_FOUND") as told:
            checkpoints.restore(state(), step=2)
        assert "step 1" not in str(told.value)
        assert_bits_equal(checkpoints.restore(state(), step=1).state, state(1))


# --- out of the way ---


def test_set_aside_and_gone_on(folder):
    (folder / "2" / "record" / "metadata").write_text("{}")
    for round in (0, 1):  # the same step may be damaged twice
        before = snapshot(folder / "2")
        with Checkpoints(folder) as checkpoints:
            step, found, damaged = checkpoints.restore(state())
            assert (step, list(damaged)) == (1, [2])
            aside = checkpoints.set_aside(damaged)
            assert aside == folder.with_name("damaged_checkpoints")
            assert snapshot(aside / f"2.{round}") == before
            assert checkpoints.steps() == [1]
            checkpoints.save(2, found)
        with Checkpoints(folder) as checkpoints:
            assert_bits_equal(checkpoints.restore(state()).state, state(1))
        (folder / "2" / "state" / "_METADATA").write_text("")
    assert sorted(path.name for path in aside.iterdir()) == ["2.0", "2.1"]


# --- whole, but of something else ---


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bias": jnp.zeros(5, jnp.bfloat16)}, r"bias was bfloat16\[7\], now bfloat16\[5\]"),
        ({"bias": jnp.zeros(7)}, r"bias was bfloat16\[7\], now float32\[7\]"),
        ({"key": jax.random.key(0, impl="rbg")}, r"key was key<fry>\[\], now key<rbg>\[\]"),
        ({"more": jnp.zeros(3)}, r"more was nothing, now float32\[3\]"),
        ({"count": None}, r"count was int32\[\], now nothing"),
        (
            {f"leaf{i}": jnp.zeros(1) for i in range(9)},
            r"leaf0 was nothing.*leaf4 was nothing, now float32\[1\]; and 4 more\. Use",
        ),
    ],
)
def test_another_configuration_is_an_error_and_not_damage(folder, changed, message):
    before = snapshot(folder)
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError, match=message) as told:
            checkpoints.restore({**state(), **changed})
        assert not isinstance(told.value, DamagedError)
        assert f"{folder / '2'} is of another configuration" in str(told.value)
    assert snapshot(folder) == before
