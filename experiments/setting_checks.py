"""Checks that the Configs of experiments share. Each mistake is one line that names the setting."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_some(config: Any, *names: str) -> None:
    """Raises ValueError unless each of these settings, all tuples, has an element."""
    for name in names:
        if not getattr(config, name):
            raise ValueError(f"{name} must be at least one; got none")


def check_least(config: Any, **least: float) -> None:
    """Raises ValueError for numbers that are too small.

    Args:
        config: the settings.
        **least: name of a number, or of a tuple of one or more numbers -> its least value.
    """
    for name, number in least.items():
        values = getattr(config, name)
        if isinstance(values, tuple):
            check_some(config, name)
        for value in np.ravel(values):
            if not value >= number:  # also NaN
                raise ValueError(f"{name} must be at least {number}; got {value}")
