"""`--resume`: an interrupted or failed run of the tests goes on with those that have not passed.

A test that passed is not run again in the same state: the same files of the repository (those that
git does not ignore), installed packages and settings of JAX. The passed tests stand in
`.pytest_cache/passed`, one file for each state.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import pytest


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def record_of(root: Path) -> Path:
    """Returns the record of passed tests for the present state."""
    lines = [f"Python {platform.python_version()}"]
    lines += sorted(f"{each.name}=={each.version}" for each in importlib.metadata.distributions())
    settings = (name for name in os.environ if name.startswith(("JAX_", "XLA_")))
    lines += [f"{name}={os.environ[name]}" for name in sorted(settings)]
    lines += [f"{digest(path.read_bytes())} {path.relative_to(root)}" for path in files_of(root)]
    return root / ".pytest_cache" / "passed" / digest("\n".join(lines).encode())


def files_of(root: Path) -> list[Path]:
    """Returns the files of the repository that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise pytest.UsageError(f"--resume must run in a git repository; {done.stderr.strip()}")
    paths = sorted(root / name for name in set(done.stdout.split("\0")) - {""})
    return [path for path in paths if path.is_file()]  # git also lists deleted files


class Resume:
    """Deselects the tests that have passed, and writes down those that pass now."""

    def __init__(self, passed: set[str], record: Path | None):
        self.passed = passed
        self.record = record  # None in a worker: the main process writes for all of them
        self.before_teardown: set[str] = set()  # tests that have passed, except their teardown

    @pytest.hookimpl(trylast=True)  # after the tests are marked and deselected by -m
    def pytest_collection_modifyitems(self, config, items):
        done = [item for item in items if item.nodeid in self.passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report):
        if self.record is None or not report.passed:
            return
        if report.when == "call":  # a skipped test has none that passed
            self.before_teardown.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self.before_teardown:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            with self.record.open("a") as file:
                file.write(report.nodeid + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Sends the passed tests to a worker, also to one that replaces a crashed worker."""
        node.workerinput["passed"] = sorted(self.passed)


def pytest_addoption(parser):
    parser.addoption(
        "--resume", action="store_true",
        help="leave out the tests that have passed with --resume, if nothing has changed since",
    )  # fmt: skip


def pytest_configure(config):
    if not config.getoption("resume"):
        return
    if hasattr(config, "workerinput"):
        plugin = Resume(set(config.workerinput["passed"]), None)
    else:
        record = record_of(config.rootpath)  # before the tests run, so that no edit is missed
        passed = set(record.read_text().splitlines()) if record.exists() else set()
        plugin = Resume(passed, record)
    config.pluginmanager.register(plugin, "resume")
