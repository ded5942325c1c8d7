"""`--resume` of the tests: what has passed is not run again, until something changes."""

import subprocess

import pytest

pytest_plugins = ["pytester"]

SETTINGS = """
[tool:pytest]
addopts = -m "not slow"
markers =
    slow: takes minutes
"""
TESTS = """
import pathlib
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_of_a_file(name):
    assert name != "b" or pathlib.Path("cache/repaired").exists()

def test_that_is_quick():
    raise AssertionError("was not selected")
"""
NOT_RECORDED = """
import pathlib
import pytest

@pytest.mark.slow
def test_is_skipped():
    pytest.skip("a package is missing")

@pytest.fixture
def fails_at_the_end():
    yield
    raise OSError

@pytest.mark.slow
def test_of_a_teardown(fails_at_the_end):
    pass
"""
EDITS = """
import pathlib
import pytest

@pytest.mark.slow
def test_during_which_its_file_changes():
    path = pathlib.Path(__file__)
    path.write_text(path.read_text().replace("number = 1", "number = 2"))

number = 1
"""
WORKERS = ("-p", "xdist", "-n", "1")


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the slow tests of a small project; returns how many passed and how many failed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    subprocess.run(["git", "init", "--quiet", pytester.path], check=True)
    (pytester.path / ".gitignore").write_text("*cache*/\n")
    (pytester.path / "setup.cfg").write_text(SETTINGS)
    (pytester.path / "README.md").write_text("")
    for folder in ("cache", "tests"):
        (pytester.path / folder).mkdir()
    (pytester.path / "tests" / "test_names.py").write_text(TESTS)
    (pytester.path / "tests" / "helper.py").write_text("")

    def run(*options):
        result = pytester.runpytest_inprocess("-p", "resumable", "-m", "slow", *options)
        counts = result.parseoutcomes()
        return counts.get("passed", 0), counts.get("failed", 0)

    return run


def test_only_tests_that_have_not_passed_run(pytester, run):
    assert run("--resume") == (2, 1)
    assert run("--resume") == (0, 1)
    assert run() == (2, 1)
    (pytester.path / "cache" / "repaired").write_text("")  # git ignores it
    assert run("--resume") == (1, 0)
    assert run("--resume") == (0, 0)


@pytest.mark.slow
def test_workers_leave_out_the_same_tests(run):
    assert run("--resume", *WORKERS) == (2, 1)
    assert run("--resume", *WORKERS) == (0, 1)


def test_everything_runs_again_after_a_change(pytester, run, monkeypatch):
    def write(name, text):
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    (pytester.path / "cache" / "repaired").write_text("")
    monkeypatch.syspath_prepend(pytester.path / "cache" / "site-packages")
    assert run("--resume") == (3, 0)
    assert run("--resume") == (0, 0)
    for change in (
        lambda: write("tests/test_names.py", TESTS + "\n"),
        lambda: write("tests/helper.py", "size = 3\n"),
        lambda: write("README.md", "A command\n"),
        lambda: (pytester.path / "README.md").unlink(),
        lambda: write("new results.json", "{}"),
        lambda: monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2"),
        lambda: write("cache/site-packages/own-1.dist-info/METADATA", "Name: own\nVersion: 1"),
    ):
        change()
        assert run("--resume") == (3, 0)
    assert run("--resume") == (0, 0)


def test_skipped_tests_and_failed_teardowns_run_again(pytester, run):
    (pytester.path / "tests" / "test_names.py").write_text(NOT_RECORDED)
    for _ in range(2):
        result = pytester.runpytest_inprocess("-p", "resumable", "-m", "slow", "--resume")
        result.assert_outcomes(passed=1, skipped=1, errors=1)


@pytest.mark.parametrize("workers", [(), pytest.param(WORKERS, marks=pytest.mark.slow)])
def test_an_edit_during_the_run_is_a_change(pytester, run, workers):
    (pytester.path / "tests" / "test_names.py").write_text(EDITS)
    assert run("--resume", *workers) == (1, 0)
    assert run("--resume", *workers) == (1, 0)
    assert run("--resume", *workers) == (0, 0)


def test_a_folder_without_git_is_refused(pytester, run):
    (pytester.path / ".git").rename(pytester.path / "cache" / "git")
    result = pytester.runpytest_inprocess("-p", "resumable", "--resume")
    result.stderr.fnmatch_lines("ERROR: --resume must run in a git repository; *")
