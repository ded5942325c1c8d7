"""A run's folder: what it refuses, what it writes, what it reads back."""

import fcntl
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attention_jax.runs.environment import environment
from attention_jax.runs.metrics_file import MetricsFile, read_lines
from attention_jax.runs.run_folder import RunFolder, write_json

CONFIG = {"model": {"score": "dot", "dim": 8}, "steps": 5, "rate": 0.1, "sizes": (3, 5)}


def strict_json(text):
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


# --- creating ---


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run(tmp_path, resume):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.create(CONFIG, resume=resume)
    assert strict_json((tmp_path / "a" / "b" / "config.json").read_text()) == {
        "model": {"score": "dot", "dim": 8},
        "steps": 5,
        "rate": 0.1,
        "sizes": [3, 5],
    }
    assert folder.read_config() == json.loads(json.dumps(CONFIG))
    assert folder.checkpoints.is_dir()
    assert not list(folder.path.glob("*.new"))


def test_environment(tmp_path):
    RunFolder(tmp_path).create(CONFIG, resume=False)
    found = strict_json((tmp_path / "env.json").read_text())
    loads = found.pop("load"), environment().pop("load")
    assert min(loads) >= 0
    assert found == {k: v for k, v in environment().items() if k != "load"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["jax"] == jax.__version__
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= set(found["packages"])
    assert found["device"].startswith(jax.default_backend())
    assert found["devices"] == jax.device_count()
    here = Path(__file__).parent
    head = subprocess.run(
        ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode == 0:
        assert head.stdout.strip() in found["git_commit"]


def test_environment_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["git_commit"] is None


def test_resuming_needs_the_word_and_the_same_configuration(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create(CONFIG, resume=False)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="already holds a run; add resume=True"):
        folder.create(CONFIG, resume=False)
    folder.create(CONFIG, resume=True)
    other = {**CONFIG, "model": {"score": "general", "dim": 8}, "rate": 0.2}
    with pytest.raises(ValueError, match="another configuration") as error:
        folder.create(other, resume=True)
    assert "model.score was 'dot', now 'general'; rate was 0.1, now 0.2." in str(error.value)
    assert "steps" not in str(error.value)
    with pytest.raises(ValueError, match="extra was None, now 1"):
        folder.create({**CONFIG, "extra": 1}, resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("resume", [False, True])
def test_the_workdir_is_a_file(tmp_path, resume):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"workdir must be a folder; .*file is a file"):
        RunFolder(tmp_path / "file").create(CONFIG, resume=resume)
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").create(CONFIG, resume=resume)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", ["", '{"model": ', "[1, 2]", "3", b"\xff\xfe\x00"])
def test_a_damaged_configuration(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.create(CONFIG, resume=False)
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        folder.read_config()
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        folder.create(CONFIG, resume=True)


def test_no_configuration(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"has no config.json"):
            RunFolder(path).read_config()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"has no config.json"):
        RunFolder(tmp_path / "file").read_config()


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl"])
@pytest.mark.parametrize("resume", [False, True])
def test_what_is_left_of_an_unknown_run_is_not_taken_for_ours(tmp_path, left, resume):
    (tmp_path / left).mkdir()
    with pytest.raises(ValueError, match=r"holds other files and no config.json"):
        RunFolder(tmp_path).create(CONFIG, resume=resume)


def deny(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", deny)
    with pytest.raises(ValueError, match=r"workdir .*run cannot be written: Permission denied"):
        RunFolder(tmp_path / "run").create(CONFIG, resume=False)


@pytest.mark.parametrize("where", ["open", "exists"])
def test_a_folder_that_cannot_be_written_or_searched(tmp_path, monkeypatch, where):
    monkeypatch.setattr(Path, where, deny)
    with pytest.raises(ValueError, match="cannot be written: Permission denied"):
        RunFolder(tmp_path).create(CONFIG, resume=False)


def test_an_error_without_a_number_is_still_explained(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match="cannot be written: the disk is full"):
        RunFolder(tmp_path).create(CONFIG, resume=False)


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})
    monkeypatch.setattr(os, "replace", deny)
    with pytest.raises(PermissionError):
        write_json(tmp_path / "x.json", {"a": 2})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": 1\n}\n'


# --- what else a run is ---


def test_files_are_kept_beside_the_configuration(tmp_path, monkeypatch):
    files = {"a.model": b"\x00\xff\n", "b.model": b""}
    folder, replace = RunFolder(tmp_path), os.replace
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *at: (deny if "b.m" in str(at) else replace)(*at))
        with pytest.raises(ValueError, match=r"workdir .* cannot be written: Permission denied"):
            folder.create(CONFIG, resume=False, files=files)
    with folder.begun(CONFIG, resume=True, files=files):  # what was cut off is begun again
        found = snapshot(tmp_path)
    assert {name: found[Path(name)] for name in files} == files
    assert not list(tmp_path.glob("*.new"))


def test_a_check_changes_nothing(tmp_path):
    RunFolder(tmp_path / "new" / "run").check(CONFIG, resume=False)
    assert list(tmp_path.iterdir()) == []
    folder, younger = RunFolder(tmp_path), {**CONFIG, "younger": 3}
    folder.create(CONFIG, resume=False)
    before = snapshot(tmp_path)
    folder.check(CONFIG, resume=True)
    folder.check(younger, resume=True, completed=lambda stored: {"younger": 3, **stored})
    with pytest.raises(ValueError, match="already holds a run; add resume=True"):
        folder.check(CONFIG, resume=False)
    with pytest.raises(ValueError, match="another configuration: younger was None, now 3"):
        folder.check(younger, resume=True)
    assert snapshot(tmp_path) == before


# --- one trainer per folder ---


def test_two_cannot_train_in_one_folder(tmp_path):
    folder, again = RunFolder(tmp_path), RunFolder(tmp_path)
    with folder.locked():
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"is in use: process \d+ on .* is training"
            ) as told:
                again.locked().__enter__()
            assert f"process {os.getpid()} on {platform.node()} is training" in str(told.value)
            assert "\n" not in str(told.value)
    with again.locked(), RunFolder(tmp_path / "..").locked():  # another folder is free
        pass
    (tmp_path / ".." / "lock").unlink()


HOLD = """
import sys, time
from attention_jax.runs.run_folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_trainer_holds_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=rf"is in use: process {holder.pid} on"):
                RunFolder(tmp_path).locked().__enter__()
        finally:
            holder.kill()
    with RunFolder(tmp_path).locked():
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunFolder(tmp_path).locked():
        pass


def test_a_lock_that_cannot_be_written(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(ValueError, match="cannot be written: Is a directory"):
        RunFolder(tmp_path).locked().__enter__()


# --- safe from a power cut ---


def test_what_has_its_name_is_on_disk(tmp_path, monkeypatch):
    on_disk, named = {}, []  # bytes of each inode; names
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(file):
        fsync(file)
        on_disk[os.fstat(file).st_ino] = os.fstat(file).st_size

    def checked_replace(old, new):
        assert on_disk[Path(old).stat().st_ino] == Path(old).stat().st_size > 0
        named.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", checked_replace)
    write_json(tmp_path / "results.json", {"a": [1, 2]})
    assert named == ["results.json"]
    monkeypatch.setattr(os, "replace", replace)
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [1.5]})
        metrics.sync()
        assert on_disk[path.stat().st_ino] == path.stat().st_size > 0


# --- metrics.jsonl ---


def test_metrics_are_lines_of_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [1.5, 0.1], "accuracy": [0.0, 1.0]})
        assert path.read_text().endswith("\n")  # at once: a reader may follow the run
        metrics.write(10, {"loss": [0.5, 1 / 3], "accuracy": [0.25, 1.0]})
    assert [strict_json(line) for line in path.read_text().splitlines()] == [
        {"step": 5, "loss": [1.5, 0.1], "accuracy": [0.0, 1.0]},
        {"step": 10, "loss": [0.5, 1 / 3], "accuracy": [0.25, 1.0]},
    ]
    assert read_lines(path)[1]["loss"] == [0.5, 1 / 3]


def test_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [math.nan, math.inf, 2.0]})
    assert strict_json(path.read_text()) == {"step": 5, "loss": [None, None, 2.0]}
    (line,) = read_lines(path)
    assert [math.isnan(value) for value in line["loss"]] == [True, True, False]


def test_later_lines_and_a_cut_one_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step},  "loss": [0.1]}}\n' for step in (5, 10, 15)]
    path.write_text("".join(lines) + '{"step": 3, "lo')
    assert [line["step"] for line in read_lines(path)] == [5, 10, 15]
    with MetricsFile(path, after_step=10) as metrics:
        assert path.read_text() == "".join(lines[:2])
        metrics.write(15, {"loss": [0.2]})
    assert path.read_text() == "".join(lines[:2]) + '{"step": 15, "loss": [0.2]}\n'


def test_no_metrics_yet(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl") == []
    with MetricsFile(tmp_path / "metrics.jsonl", after_step=0):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"st\n{"step": 15}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be read"):
        read_lines(path)
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be read"):
        MetricsFile(path, after_step=5)
    assert "15" in path.read_text()


def test_timing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create(CONFIG, resume=False)
    folder.add_timing({"from_step": 0, "seconds": 1.5})
    folder.add_timing({"from_step": 3, "seconds": None})
    assert read_lines(tmp_path / "timing.jsonl") == [
        {"from_step": 0, "seconds": 1.5},
        {"from_step": 3, "seconds": None},
    ]


class FullDisk:
    """A file on a disk that is full."""

    def write(self, *_):
        raise OSError(28, "No space left on device")

    close = flush = write


def test_a_line_on_a_full_disk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [0.5]})
        metrics._file.close()
        metrics._file = FullDisk()
        with pytest.raises(ValueError, match=r"metrics.jsonl cannot be written: No space left"):
            metrics.write(10, {"loss": [0.25]})
    assert [line["step"] for line in read_lines(path)] == [5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_timing_on_a_full_disk(tmp_path):
    (tmp_path / "timing.jsonl").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"timing.jsonl cannot be written: No space left"):
        RunFolder(tmp_path).add_timing({"seconds": 1.5})
