"""The implementations by name: those that run anywhere, and the kernels of one kind of device.

A kernel's module is imported when the kernel is first used, because Pallas takes a fifth of the
time to import this library, and few calls use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from attention_jax.tiles import Inputs, Options, tiled
from attention_jax.whole import reference

# Where the kernels are, from the one that None may choose to those that it never chooses.
_MODULES = {
    "cudnn": "attention_jax.kernels.cudnn",
    "mosaic_tpu": "attention_jax.experimental.mosaic_tpu",
    "mosaic_gpu": "attention_jax.experimental.mosaic_gpu",
}


def _imported_when_used(module: str) -> Callable[[Options, Inputs], Any]:
    def attend(options: Options, inputs: Inputs) -> Any:
        return importlib.import_module(module).attend(options, inputs)

    return attend


# The functions behind the argument `implementation`; see `Inputs` for what they take.
IMPLEMENTATIONS: dict[str, Callable[[Options, Inputs], Any]] = {
    "reference": reference.attend,
    "tiled": tiled.attend,
    **{name: _imported_when_used(module) for name, module in _MODULES.items()},
}
# Those that take a whole batch; the others are functions of one example.
OF_A_BATCH = ("cudnn",)
