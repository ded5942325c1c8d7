"""Default choice of implementation and tile sizes, by score, size and backend.

The numbers were measured on 2 CPU cores, float32, jax 0.10.2, forward + backward, for single
examples and for batches: `scripts/benchmark.py --benchmarks crossover` repeats the measurement. GPU
and TPU were not measured: a kernel of the backend is chosen where it can serve, and otherwise
"reference" until its logits take too much memory. For TPUs the numbers are the compiler's
(`scripts/README.md`, "Programs compiled for TPUs").
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable

import jax
from jax.export import is_symbolic_dim

from attention_jax.core.backend import nvidia_generation
from attention_jax.implementations import cudnn
from attention_jax.implementations.batching import one_example
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.scores import Score, TileCost, needs_stand_ins

# For each `tile_cost`, the T S of one example from which tiles are faster, alone and in a batch of
# 64. (Just below it, tiles are faster alone and slower in the batch.)
TILED_FROM = {"elementwise": 2**10, "matmul": 2**18, "materialized": 2**16}
# Pairs of the whole batch from which tiles are used for memory: 512 MiB of float32 logits. On a TPU
# half of it: compiled for a v5e, scaled dot in bfloat16 with 16 heads of 2,048 tokens takes 385 MiB
# of temporaries and 7.6 million cycles with "reference", 0.7 MiB and 6.2 million with "tiled".
TILED_FROM_IN_ALL = {"cpu": 2**27, "gpu": 2**27, "tpu": 2**26}

LARGEST_BLOCK = {"elementwise": 1024, "matmul": 512, "materialized": 512}
TILE_PAIRS = 2**20  # pairs of one tile over the whole batch: a few MiB for each array
SMALLEST_BLOCK = 64

# Queries and keys of a tile in the kernels for a TPU, whose tiles are not shared by a batch.
TPU_BLOCKS: dict[TileCost, BlockSizes] = {
    "matmul": BlockSizes(512, 512),
    "elementwise": BlockSizes(256, 512),
    "materialized": BlockSizes(128, 128),
}
LEAST_LENGTH_ON_TPU = 128  # of queries and of keys: a whole vector register

# Compute capability from which cuDNN has fused attention: Ampere.
CUDNN_GENERATION = 8.0

# The size assumed for a symbolic batch axis, when `jax.export` compiles for any batch size.
EXAMPLES_OF_ANY_BATCH = 8

# Says why a device kernel should not be chosen for these options and inputs with batch axes; None
# if it should.
Objection = Callable[[Options, Inputs], str | None]


def _against_cudnn(options: Options, inputs: Inputs) -> str | None:
    generation = nvidia_generation()
    if generation is not None and generation < CUDNN_GENERATION:
        return "the GPU has no fused attention of cuDNN"
    batch_shape = inputs.query.shape[:-2]
    if any(tokens.shape[:-2] != batch_shape for tokens in (inputs.key, inputs.value)):
        return "copies keys and values that examples share"
    return cudnn.reason_against(options, inputs)


def _against_mosaic_tpu(options: Options, inputs: Inputs) -> str | None:
    lengths = inputs.query.shape[-2], inputs.key.shape[-2]
    if any(is_symbolic_dim(length) for length in lengths):
        return "the number of tiles is unknown"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "XLA cannot divide a kernel between devices, only jax.shard_map can"
    if min(lengths) < LEAST_LENGTH_ON_TPU:
        return "the kernels would compute more padding than pairs"
    from attention_jax.implementations import mosaic_tpu  # imports Pallas

    return mosaic_tpu.reason_against(
        options, one_example(options.score, options.normalizer, inputs)
    )


# The kernels of each backend, the preferred one first. The first without an objection is chosen.
KERNELS: dict[str, dict[str, Objection]] = {
    "gpu": {"cudnn": _against_cudnn},
    "tpu": {"mosaic_tpu": _against_mosaic_tpu},
}


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

    def with_tiles(name: str) -> Options:
        tiles = block_sizes or chosen_block_sizes(options.score, inputs, name)
        return dataclasses.replace(options, block_sizes=tiles)

    if implementation is not None:
        return implementation, with_tiles(implementation)
    for kernel, objection in KERNELS.get(backend, {}).items():
        candidate = with_tiles(kernel)
        if objection(candidate, inputs) is None:
            return kernel, candidate
    name = _portable(options.score, inputs, backend)
    return name, with_tiles(name)


def chosen_implementation(
    score: Score, inputs: Inputs, backend: str, options: Options | None = None
) -> str:
    """The name that `choose` gives a call; without options, softmax without any."""
    return choose(None, None, options or Options(score, BlockSizes()), inputs, backend)[0]


def _portable(score: Score, inputs: Inputs, backend: str) -> str:
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if is_symbolic_dim(target_length) or is_symbolic_dim(source_length):
        return "reference"  # the number of tiles is unknown
    pairs = target_length * source_length
    large = _batch_size(inputs) * pairs >= TILED_FROM_IN_ALL.get(backend, 2**27)
    faster = backend == "cpu" and pairs >= TILED_FROM[score.tile_cost]
    return "tiled" if large or faster else "reference"


def chosen_block_sizes(score: Score, inputs: Inputs, implementation: str = "tiled") -> BlockSizes:
    """The tile sizes for these inputs; a large batch gets small tiles in "tiled"."""
    cost = score.tile_cost
    if implementation == "mosaic_tpu":
        return TPU_BLOCKS[cost]
    if cost != "materialized" and inputs.mask is not None:
        sizes = inputs.query.shape[-1], inputs.key.shape[-1]
        if needs_stand_ins(score, inputs.params, *sizes):
            cost = "materialized"  # stand-ins are chosen per pair and feature
    pairs = TILE_PAIRS // max(_batch_size(inputs), 1)
    if cost == "materialized":
        # `pair` or its gradient may keep an array [t, s, D] in memory.
        pairs //= inputs.key.shape[-1]
    # Most of a tile that is much wider than a sliding window is masked.
    window = sys.maxsize if inputs.mask is None else inputs.mask.most_keys()
    size = min(LARGEST_BLOCK[cost], max(window // 4, 2 * SMALLEST_BLOCK))
    size = 2 ** (size.bit_length() - 1)
    while size > SMALLEST_BLOCK and size * size > pairs:
        size //= 2
    return BlockSizes(query=size, key=size)


def _batch_size(inputs: Inputs) -> int:
    """The number of examples."""
    batch = inputs.query.shape[:-2]
    return math.prod(EXAMPLES_OF_ANY_BATCH if is_symbolic_dim(size) else size for size in batch)
