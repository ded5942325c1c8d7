"""Default choice between "reference" and "tiled", and of tile sizes, by score, size and backend.

The numbers were measured on 2 CPU cores, float32, jax 0.10.2, forward + backward, for single
examples and for batches: `scripts/benchmark.py --benchmarks crossover` repeats the measurement. GPU
and TPU were not measured: "reference" is chosen until its logits take too much memory. Kernels are
chosen in `kernels/choice.py`.
"""

from __future__ import annotations

import math
import sys

from jax.export import is_symbolic_dim

from attention_jax.implementations.contract import BlockSizes, Inputs
from attention_jax.scores import Score
from attention_jax.scores.slopes import needs_stand_ins

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

# The size assumed for a symbolic batch axis, when `jax.export` compiles for any batch size.
EXAMPLES_OF_ANY_BATCH = 8


def portable_implementation(score: Score, inputs: Inputs, backend: str) -> str:
    """The name of the faster implementation, or of "tiled" where logits take too much memory."""
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if is_symbolic_dim(target_length) or is_symbolic_dim(source_length):
        return "reference"  # the number of tiles is unknown
    pairs = target_length * source_length
    large = _batch_size(inputs) * pairs >= TILED_FROM_IN_ALL.get(backend, 2**27)
    faster = backend == "cpu" and pairs >= TILED_FROM[score.tile_cost]
    return "tiled" if large or faster else "reference"


def chosen_block_sizes(score: Score, inputs: Inputs) -> BlockSizes:
    """The tile sizes for these inputs; a large batch gets small tiles."""
    cost = score.tile_cost
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
