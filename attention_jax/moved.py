"""Modules under the names that they had, where pickles of earlier versions find what they name."""

import importlib
import sys
import types

MOVED = {
    "functional.capture_point": "analysis.capture_point",
    "functional.interop": "interop.flax_layers interop.jax_nn",
    "functional.interop.flax_layers": "interop.flax_layers",
    "functional.interop.jax_nn": "interop.jax_nn",
    "functional.local": "positions.window",
    "implementations.contract": "tiles.options",
    "implementations.masked_softmax": "whole.masked_softmax",
    "normalizers.rows": "normalizers.softmax_rows",
    "pairwise.biases": "positions.biases positions.contract",
    "pairwise.dropout": "positions.dropout",
    "pairwise.mask_algebra": "positions.contract",
    "pairwise.masks": "positions.masks",
    "pairwise.position_functions": "positions.contract positions.function",
    "scores.soft_cap": "scores.wrapped",
}
for _before, _now in MOVED.items():
    _name = f"attention_jax.{_before}"
    try:  # a module that remains, without some of its classes
        _module = importlib.import_module(_name)
    except ModuleNotFoundError:
        _folder = _name.rpartition(".")[0]  # Python imports it first
        sys.modules.setdefault(_folder, types.ModuleType(_folder))
        _module = sys.modules[_name] = types.ModuleType(_name)
    for _new in (f"attention_jax.{each}" for each in _now.split()):
        for _key, _value in vars(importlib.import_module(_new)).items():
            if getattr(_value, "__module__", None) == _new:  # its own classes and functions
                vars(_module).setdefault(_key, _value)

# Modules that are imported only when something in them is asked for.
for _before, _now in {"export": "saved", "loop": "step"}.items():
    _module = types.ModuleType(f"attention_jax.training.{_before}")
    vars(_module)["__getattr__"] = lambda name, now=f"attention_jax.training.{_now}": getattr(
        importlib.import_module(now), name
    )
    sys.modules[_module.__name__] = _module
