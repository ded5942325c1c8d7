"""`--resume` of the tests: what has passed is not run again, until its sources change."""

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
    assert name != "b" or pathlib.Path("repaired").exists()

def test_that_is_quick():
    raise AssertionError("was not selected")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the slow tests of a small project; returns how many passed and how many failed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (pytester.path / "setup.cfg").write_text(SETTINGS)
    (pytester.path / "tests").mkdir()
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
    (pytester.path / "repaired").write_text("")
    assert run("--resume") == (1, 0)
    assert run("--resume") == (0, 0)


@pytest.mark.slow
def test_workers_leave_out_the_same_tests(run):
    workers = ("-p", "xdist", "-n", "1")
    assert run("--resume", *workers) == (2, 1)
    assert run("--resume", *workers) == (0, 1)


def test_changed_sources_are_tested_again(pytester, run):
    (pytester.path / "repaired").write_text("")
    assert run("--resume") == (3, 0)
    for path, changed in (("test_names.py", TESTS + "\n"), ("helper.py", "size = 3\n")):
        assert run("--resume") == (0, 0)
        (pytester.path / "tests" / path).write_text(changed)
        assert run("--resume") == (3, 0)
