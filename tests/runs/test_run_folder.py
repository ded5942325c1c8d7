"""A run's folder: what it refuses, what it writes, what it reads back."""

import concurrent.futures
import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from mistakes import refused
from saved_files import fsynced, snapshot

from attention_jax.runs import run_folder
from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import check_run_folder, open_run_folder, read_config, write_json

CONFIG = {"model": {"score": "dot", "dim": 8}, "steps": 5, "rate": 0.1, "sizes": [3, 5]}


def same(stored):
    if stored != CONFIG:
        raise ValueError("it is another run")


def check(folder, *, resume=False, files=(), compare=same):
    """Checks a folder as a run that is prepared does."""
    if (stored := check_run_folder(folder, resume=resume, files=files)) is not None:
        compare(stored)


def opened(folder, config=CONFIG, *, resume=False, files=()):
    check_now = functools.partial(check, folder, resume=resume, files=files)
    return open_run_folder(folder, config, dict(files), check=check_now)


def begin(*arguments, **options):
    """Begins or resumes a run and ends it at once."""
    with opened(*arguments, **options):
        pass


# --- beginning and resuming ---


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run(tmp_path, resume):
    folder, files = tmp_path / "a" / "b", {"a.model": b"\x00\xff\n", "b.model": b""}
    begin(folder, resume=resume, files=files)
    assert read_config(folder) == CONFIG
    assert {path.name: path.read_bytes() for path in folder.glob("*.model")} == files
    assert not list(folder.glob("*.new"))


def test_the_environment_is_recorded(tmp_path):
    begin(tmp_path)
    found, now = json.loads((tmp_path / "env.json").read_text()), environment()
    assert min(found.pop("load"), now.pop("load")) >= 0
    assert found == now
    assert found["usable_cpus"] == len(os.sched_getaffinity(0)) <= found["cpus"]
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


def test_a_commit_is_dirty_where_sources_differ(tmp_path, monkeypatch):
    def git(*words):
        user = ("-c", "user.name=A", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *user, *words], check=True, capture_output=True)

    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "library").mkdir()
    for name in ("a.py", "setup.cfg", "notes.txt", "library/b.py"):
        (tmp_path / name).write_text("1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.setattr("attention_jax.runs.environment._LIBRARY", tmp_path / "library")
    clean = environment()["git_commit"]
    assert re.fullmatch("[0-9a-f]{40}", clean)
    for name, is_source in {
        "notes.txt": False, "new.txt": False, "a.py": True, "setup.cfg": True, "new.py": True,
        "new/c.py": True, "library/b.py": True,
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("2\n")
        assert environment()["git_commit"] == clean + "-dirty" * is_source
        path.unlink()
        git("checkout", ".")


def test_environment_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["git_commit"] is None


def test_resuming_needs_resume_and_the_same_configuration(tmp_path):
    folder = tmp_path / "run"
    begin(folder)
    before = snapshot(folder)
    with pytest.raises(ValueError, match="already holds a run; add resume=True"):
        begin(folder)
    with pytest.raises(ValueError, match=r"^it is another run"):
        check(folder, resume=True, compare=lambda stored: same({}))
    check(folder, resume=True)
    check(tmp_path / "new" / "run")
    assert snapshot(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    begin(folder, resume=True)


PARTS = ("lock", "config.json.new", "config.json", "env.json.new", "env.json")


@pytest.mark.parametrize("count", range(len(PARTS) + 1))
def test_a_start_that_was_cut_off_begins_again(tmp_path, count):
    for name in PARTS[:count]:
        text = json.dumps(CONFIG)
        (tmp_path / name).write_text(text[:9] if name.endswith(".new") else text)
    begin(tmp_path, resume=True)
    assert read_config(tmp_path) == CONFIG


@pytest.mark.parametrize(
    "left", ["checkpoints", "metrics.jsonl", "timing.jsonl", "wandb", "initial", "a.model"]
)
@pytest.mark.parametrize("resume", [False, True])
def test_files_that_a_run_would_overwrite_are_refused(tmp_path, left, resume):
    (tmp_path / left).mkdir()
    before = snapshot(tmp_path)
    refused(
        f"no config.json, and a new run would overwrite {left}$",
        lambda: begin(tmp_path, resume=resume, files={"a.model": b""}),
    )
    assert snapshot(tmp_path) == before


def test_files_of_others_stay(tmp_path):
    """A scheduler opens its log before the run begins."""
    (tmp_path / "slurm-123.out").write_text("begun")
    (tmp_path / "code").mkdir()
    begin(tmp_path, files={"a.model": b""})
    assert (tmp_path / "slurm-123.out").read_text() == "begun"
    begin(tmp_path, resume=True)


@pytest.mark.parametrize("content", [b"", b'{"model": ', b"[1, 2]", b"3", b"\xff\xfe\x00"])
def test_a_damaged_configuration(tmp_path, content):
    begin(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    for use in (read_config, lambda folder: begin(folder, resume=True)):
        with pytest.raises(ValueError, match=r"config.json cannot be read"):
            use(tmp_path)


# --- what cannot be written ---


def deny(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_the_workdir_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"workdir must be a folder; .*file is a file"):
        begin(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        begin(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "place", [(Path, "mkdir"), (Path, "open"), (Path, "exists"), (os, "replace")]
)
def test_a_folder_that_cannot_be_written_or_searched(tmp_path, monkeypatch, place):
    monkeypatch.setattr(*place, deny)
    with pytest.raises(ValueError, match=r"workdir .*run cannot be written: Permission denied"):
        begin(tmp_path / "run")


def test_json_has_its_name_once_all_of_it_is_on_disk(tmp_path, monkeypatch):
    on_disk, replace = fsynced(monkeypatch), os.replace

    def checked_replace(old, new):
        assert on_disk(Path(old))
        replace(old, new)

    monkeypatch.setattr(os, "replace", checked_replace)
    write_json(tmp_path / "x.json", {"a": [1, 2]})
    monkeypatch.setattr(os, "replace", deny)
    with pytest.raises(PermissionError):
        write_json(tmp_path / "x.json", {"a": 2})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": [1, 2]\n}\n'


# --- one trainer per folder ---


def test_two_cannot_train_in_one_folder(tmp_path):
    with opened(tmp_path / "run"):
        for _ in range(2):
            who = f"process {os.getpid()} on {re.escape(platform.node())} is training"
            refused(f"is in use: {who}", lambda: begin(tmp_path / "run", resume=True))
        begin(tmp_path / "other")  # another folder is free
    begin(tmp_path / "run", resume=True)


def test_of_two_starts_at_one_instant_one_succeeds(tmp_path):
    def start(config):
        ready.wait()
        with contextlib.suppress(ValueError), opened(folder, config):
            tried.wait()
            return config
        tried.wait()
        return None

    for index in range(6):
        folder = tmp_path / str(index)
        ready, tried = threading.Barrier(2), threading.Barrier(2)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            started = list(threads.map(start, [{"name": "left"}, {"name": "right"}]))
        assert [config for config in started if config] == [read_config(folder)]


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    begin(tmp_path)
    assert "cannot be locked (Operation not supported)" in capsys.readouterr().err


def test_a_system_without_flock(tmp_path, monkeypatch, capsys):
    """As on Windows: the library is imported, and runs are not locked."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "getloadavg")
    spec = importlib.util.spec_from_file_location("without_flock", run_folder.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.open_run_folder(tmp_path, CONFIG, {}, check=functools.partial(check, tmp_path)):
        assert json.loads((tmp_path / "env.json").read_text())["load"] is None
    assert capsys.readouterr().err.startswith(f"warning: workdir {tmp_path} cannot be locked")
