"""Modules under the names that they had: pickles of earlier versions find their classes there."""

import importlib
import sys
import types

MOVED = {
    "functional.capture_point": "analysis.capture_point",
    "functional.interop": "functional.interop.flax_layers",
    "functional.local": "positions.window",
    "implementations.contract": "tiles.options",
    "normalizers.rows": "normalizers.softmax_rows",
    "pairwise.biases": "positions.biases positions.contract",
    "pairwise.dropout": "positions.dropout",
    "pairwise.mask_algebra": "positions.contract",
    "pairwise.masks": "positions.masks",
    "pairwise.position_functions": "positions.contract",
    "scores.soft_cap": "scores.wrapped",
}
for _before, _now in MOVED.items():
    _name = f"attention_jax.{_before}"
    try:  # a module that remains, without some of its classes
        _module = importlib.import_module(_name)
    except ModuleNotFoundError:
        _module = sys.modules[_name] = types.ModuleType(_name)
    for _new in _now.split():
        for _key, _value in vars(importlib.import_module(f"attention_jax.{_new}")).items():
            if isinstance(_value, type):
                vars(_module).setdefault(_key, _value)
