"""`--resume`: an interrupted or failed run of the tests goes on with those that have not passed.

A test that passed is not run again as long as its file, the other sources (the library,
experiments, scripts and helper modules of the tests) and the versions of Python and JAX are the
same. The passed tests stand in `.pytest_cache/passed`, one file for each state of the sources.
"""

import hashlib
import platform
from pathlib import Path

import jax
import pytest

FOLDERS = ("attention_jax", "experiments", "scripts", "tests")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def record_of(root: Path) -> Path:
    """Returns the file for the present sources, except the test files, and versions."""
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    lines = [f"Python {platform.python_version()}, jax {jax.__version__}"]
    for path in sorted((*paths, root / "setup.cfg")):
        if not path.name.startswith("test_"):
            lines.append(f"{digest(path.read_bytes())} {path.relative_to(root)}")
    return root / ".pytest_cache" / "passed" / digest("\n".join(lines).encode())


class Resume:
    """Deselects the tests that have passed, and writes down those that pass now."""

    def __init__(self, root: Path, passed: set[str], record: Path | None):
        self.root = root
        self.passed = passed
        self.record = record  # None in a worker: the main process writes for all of them
        self.failed: set[str] = set()
        self.digests: dict[str, str] = {}  # of test files

    def line_of(self, nodeid: str) -> str:
        """Returns the line that stands for a passed test: its name and the digest of its file."""
        name = nodeid.split("::")[0]
        if name not in self.digests:
            self.digests[name] = digest((self.root / name).read_bytes())
        return f"{self.digests[name]} {nodeid}"

    @pytest.hookimpl(trylast=True)  # after the tests are marked and deselected by -m
    def pytest_collection_modifyitems(self, config, items):
        done = [item for item in items if self.line_of(item.nodeid) in self.passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item not in done]

    def pytest_runtest_logreport(self, report):
        if self.record is None:
            return
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self.failed:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            with self.record.open("a") as file:
                file.write(self.line_of(report.nodeid) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Sends the passed tests to a worker, also to one that replaces a crashed worker."""
        node.workerinput["passed"] = sorted(self.passed)


def pytest_addoption(parser):
    parser.addoption(
        "--resume", action="store_true",
        help="leave out the tests that have passed with --resume and whose sources are the same",
    )  # fmt: skip


def pytest_configure(config):
    if not config.getoption("resume"):
        return
    if hasattr(config, "workerinput"):
        plugin = Resume(config.rootpath, set(config.workerinput["passed"]), None)
    else:
        record = record_of(config.rootpath)
        passed = set(record.read_text().splitlines()) if record.exists() else set()
        plugin = Resume(config.rootpath, passed, record)
    config.pluginmanager.register(plugin, "resume")
