"""The implementations by name: those that run anywhere, cuDNN, and the experimental kernels.

The module of an experimental kernel is imported when the kernel is first used, because Pallas takes
a fifth of the time to import this library, and few calls use it.
"""

import importlib
from collections.abc import Callable
from typing import Any

from attention_jax.kernels import cudnn
from attention_jax.tiles import Inputs, Options, tiled
from attention_jax.whole import reference


def _imported_when_used(name: str) -> Callable[[Options, Inputs], Any]:
    def attend(options: Options, inputs: Inputs) -> Any:
        return importlib.import_module(f"attention_jax.experimental.{name}").attend(options, inputs)

    return attend


# The functions behind the argument `implementation`; see `Inputs` for what they take.
IMPLEMENTATIONS: dict[str, Callable[[Options, Inputs], Any]] = {
    "reference": reference.attend,
    "tiled": tiled.attend,
    "cudnn": cudnn.attend,
    "mosaic_tpu": _imported_when_used("mosaic_tpu"),
    "mosaic_gpu": _imported_when_used("mosaic_gpu"),
}
# Those that take a whole batch; the others are functions of one example.
OF_A_BATCH = ("cudnn",)
# Those that choose the sizes of their tiles, which a batch does not share.
CHOOSE_TILES = ("mosaic_tpu",)
