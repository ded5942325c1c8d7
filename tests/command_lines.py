"""Loads a script or an experiment, and runs its command line in this process."""

import importlib.util
import sys
from pathlib import Path

import pytest
from command_line import run_command

ROOT = Path(__file__).parents[1]


def load(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def call(module, *arguments, monkeypatch):
    """Runs a command line in process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ("Arguments", "arguments_of", "Config")
    arguments_of = next(getattr(module, name) for name in names if hasattr(module, name))
    with pytest.raises(SystemExit) as exit_info:
        run_command(arguments_of, module.main)
    return exit_info.value.code or 0
