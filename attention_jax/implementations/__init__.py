"""Implementations of attention: one file each, and one line in `IMPLEMENTATIONS`."""

from __future__ import annotations

from collections.abc import Callable

from attention_jax.implementations import cudnn, mosaic_tpu, reference, tiled
from attention_jax.implementations.contract import BlockSizes, Inputs, Options

# The functions behind the argument `implementation`, by name; see `Inputs` for what they take.
IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference.attend,
    "tiled": tiled.attend,
    "cudnn": cudnn.attend,
    "mosaic_tpu": mosaic_tpu.attend,
}
PORTABLE = ("reference", "tiled")  # those that run on every device, with every option

__all__ = ["IMPLEMENTATIONS", "PORTABLE", "BlockSizes", "Inputs", "Options"]
