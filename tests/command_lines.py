"""Loads a script or an experiment, and runs its command line in this process."""

import contextlib
import functools
import importlib.util
import io
import sys
from pathlib import Path

import jax
import pytest

from attention_jax.commands.command_line import run_command
from experiments import lab

ROOT = Path(__file__).parents[1]


@functools.cache
def load(path: str):
    """Imports the file at `path`, relative to the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def call(module, *arguments, monkeypatch):
    """Runs the command line of a loaded file; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = functools.partial(lab.main, module.__name__)
    if hasattr(module, "main"):
        arguments_of = getattr(module, "arguments_of", None) or module.Arguments
        run = functools.partial(run_command, arguments_of, module.main)
    with pytest.raises(SystemExit) as exit_info:
        run()
    return exit_info.value.code or 0


@contextlib.contextmanager
def users_settings():
    """JAX promotes dtypes and ranks as on a user's machine."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def runner(monkeypatch, capfd):
    """The fixture `command` of conftest.py."""
    monkeypatch.setenv("COLUMNS", "500")

    def run(name, *arguments, stdin=b""):
        capfd.readouterr()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii"))
        with users_settings():
            status = call(load(f"scripts/{name}.py"), *arguments, monkeypatch=monkeypatch)
        return status, *capfd.readouterr()

    return run


def check_error(found, *named):
    """Asserts that a command ended with one line that names these words."""
    status, out, err = found
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert all(name in err for name in named)
