"""Implementations of attention: one file each, and one line in `IMPLEMENTATIONS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attention_jax.implementations import cudnn, reference, tiled
from attention_jax.implementations.contract import BlockSizes, Inputs, Options


def _mosaic_tpu(options: Options, inputs: Inputs) -> Any:
    # Pallas takes a fifth of the time to import this library, and few calls use it.
    from attention_jax.implementations import mosaic_tpu

    return mosaic_tpu.attend(options, inputs)


def _mosaic_gpu(options: Options, inputs: Inputs) -> Any:
    from attention_jax.implementations import mosaic_gpu  # imports Pallas

    return mosaic_gpu.attend(options, inputs)


# The functions behind the argument `implementation`, by name; see `Inputs` for what they take.
IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference.attend,
    "tiled": tiled.attend,
    "cudnn": cudnn.attend,
    "mosaic_tpu": _mosaic_tpu,
    "mosaic_gpu": _mosaic_gpu,
}
PORTABLE = ("reference", "tiled")  # those that run on every device, with every option

__all__ = ["IMPLEMENTATIONS", "PORTABLE", "BlockSizes", "Inputs", "Options"]
