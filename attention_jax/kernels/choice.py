"""The choice of implementation and tile sizes that a call leaves open, kernels included.

`None` chooses no kernel that has not been run on its hardware. cuDNN's attention, XLA's own path on
an NVIDIA GPU, is chosen there wherever it can serve.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from attention_jax.implementations.choice import chosen_block_sizes, portable_implementation
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.scores import Score, TileCost

# Queries and keys of a tile in the kernels for a TPU, whose tiles are not shared by a batch; by the
# compiler's count of their instructions (`scripts/README.md`, "Programs compiled for TPUs").
TPU_BLOCKS: dict[TileCost, BlockSizes] = {
    "matmul": BlockSizes(512, 512),
    "elementwise": BlockSizes(256, 512),
    "materialized": BlockSizes(128, 128),
}

# Compute capability from which cuDNN has fused attention: Ampere.
CUDNN_GENERATION = 8.0


def current_backend() -> str:
    """The platform of `jax.default_device` if it is set, otherwise `jax.default_backend()`.

    One of "cpu", "gpu" and "tpu". Arrays that were put on another device, and programs that
    `jax.export` makes for another platform, are not seen.

    >>> with jax.default_device(jax.devices("cpu")[0]):
    ...     current_backend()
    'cpu'
    """
    settings: Any = jax.config  # they are made while JAX is imported
    device = settings.jax_default_device
    if device is None:
        return jax.default_backend()
    platform: str = device if isinstance(device, str) else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def nvidia_generation() -> float | None:
    """The compute capability of the first GPU: 9.0 for Hopper, and 0 for another maker's GPU.

    None if JAX sees no GPU: a program is then compiled for one that is not there.
    """
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if jax.default_backend() != "gpu" or not gpus:
        return None
    try:
        return float(gpus[0].compute_capability)
    except (AttributeError, ValueError):  # AMD's are names, such as gfx942
        return 0.0


def choose(
    implementation: str | None,
    block_sizes: BlockSizes | None,
    options: Options,
    inputs: Inputs,
    backend: str,
) -> tuple[str, Options]:
    """What a call leaves open: (the implementation's name, the options with tile sizes).

    Args:
        implementation: a name that is kept, or None.
        block_sizes: sizes that are kept, or None.
        options: those of the call; their block sizes are replaced.
        inputs: with batch axes.
        backend: as `current_backend` returns it.
    """
    score = options.score
    if implementation is None and backend == "gpu" and _serves_cudnn(options, inputs):
        implementation = "cudnn"
    if implementation is None:
        implementation = portable_implementation(score, inputs, backend)
    if block_sizes is None and implementation == "mosaic_tpu":
        block_sizes = TPU_BLOCKS[score.tile_cost]
    if block_sizes is None:
        block_sizes = chosen_block_sizes(score, inputs)
    return implementation, dataclasses.replace(options, block_sizes=block_sizes)


def chosen_implementation(
    score: Score, inputs: Inputs, backend: str, options: Options | None = None
) -> str:
    """The name that `choose` gives a call; without options, softmax without any."""
    return choose(None, None, options or Options(score, BlockSizes()), inputs, backend)[0]


def _serves_cudnn(options: Options, inputs: Inputs) -> bool:
    """Whether cuDNN can compute this on the GPU that is there, without a copy for each head."""
    from attention_jax.kernels import cudnn

    generation = nvidia_generation()
    if generation is not None and generation < CUDNN_GENERATION:
        return False
    batch_shape = inputs.query.shape[:-2]
    if any(tokens.shape[:-2] != batch_shape for tokens in (inputs.key, inputs.value)):
        return False
    return cudnn.reason_against(options, inputs) is None
