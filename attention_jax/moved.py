"""Modules under the names that they had: pickles of earlier versions find their classes there."""

import importlib
import sys

MOVED = {
    "functional.capture_point": "analysis.capture_point",
    "implementations.contract": "tiles.options",
    "normalizers.rows": "normalizers.softmax_rows",
    "pairwise.biases": "positions.biases",
    "pairwise.dropout": "positions.dropout",
    "pairwise.mask_algebra": "positions.mask_algebra",
    "pairwise.masks": "positions.masks",
    "pairwise.position_functions": "positions.position_functions",
    "scores.soft_cap": "scores.wrapped",
}
for _before, _now in MOVED.items():
    sys.modules[f"attention_jax.{_before}"] = importlib.import_module(f"attention_jax.{_now}")
