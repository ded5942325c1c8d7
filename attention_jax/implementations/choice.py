"""Which implementation and which tiles, where the caller leaves it open: all numbers stand here.

Measured on 2 CPU cores, float32, jax 0.10.2, forward + backward, for one example and for batches:
`scripts/benchmark.py --benchmarks crossover` does it again. A GPU or TPU has not been measured:
there, the materialised form is kept until memory speaks against it.
"""

from __future__ import annotations

import math
import sys

from attention_jax.implementations.contract import BlockSizes, Inputs
from attention_jax.scores import Score

# A score's `pair_cost` -> T S of one example from which tiles are faster, alone and in a batch of
# 64. (Just below it, tiles are faster alone and slower in the batch.)
TILED_FROM = {"additive": 2**10, "dot": 2**18, "other": 2**16}
TILED_FROM_IN_ALL = 2**27  # pairs of all examples together, for memory: 512 MiB of float32 logits

LARGEST_BLOCK = {"additive": 1024, "dot": 512, "other": 512}
TILE_PAIRS = 2**20  # of all examples together: a few MiB for each array of a tile
SMALLEST_BLOCK = 64


def chosen_implementation(score: Score, inputs: Inputs, backend: str) -> str:
    """The name of the implementation that serves these inputs fastest.

    Args:
        score: the score.
        inputs: with batch axes.
        backend: as `jax.default_backend()` says it.
    """
    *batch, target_length, _ = inputs.query.shape
    pairs = target_length * inputs.key.shape[-2]
    large = math.prod(batch) * pairs >= TILED_FROM_IN_ALL
    faster = backend == "cpu" and pairs >= TILED_FROM[score.pair_cost]
    return "tiled" if large or faster else "reference"


def chosen_block_sizes(score: Score, inputs: Inputs) -> BlockSizes:
    """Tiles as large as pays, smaller where many examples share the loop."""
    cost = score.pair_cost
    pairs = TILE_PAIRS // max(math.prod(inputs.query.shape[:-2]), 1)
    if cost == "other":
        # Its `pair`, or the gradient of it, may hold a tile of vectors: [t, s, D].
        pairs //= inputs.key.shape[-1]
    # A tile much wider than a sliding window is mostly masked.
    window = sys.maxsize if inputs.mask is None else inputs.mask.most_keys()
    size = min(LARGEST_BLOCK[cost], max(window // 4, 2 * SMALLEST_BLOCK))
    size = 2 ** (size.bit_length() - 1)
    while size > SMALLEST_BLOCK and size * size > pairs:
        size //= 2
    return BlockSizes(query=size, key=size)
