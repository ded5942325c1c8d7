"""TPUs and GPUs that are not here: their compilers run on a CPU, and say what a program would do.

A test that uses them is marked `accelerators`, and skipped where a compiler is not installed.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from compilation import targets
from compilation.targets import array as on_device

__all__ = ["custom_calls", "h100_devices", "on_device", "tpu_devices"]


def tpu_devices(count: int) -> list[Any]:
    """The devices of a slice of v5e."""
    return _devices("v5e", count)


def h100_devices(count: int = 1) -> list[Any]:
    """The devices of a node of H100s."""
    return _devices(targets.H100, count)


def _devices(target: str, count: int) -> list[Any]:
    if reason := targets.missing_compiler(target):
        pytest.skip(reason)
    return targets.devices(target, count)


def custom_calls(compiled: Any) -> list[str]:
    """The targets of the custom calls of a compiled program."""
    return re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())
