"""Which implementation and which tiles, where the caller leaves it open: all numbers stand here.

Measured on 2 CPU cores, float32, jax 0.10.2, forward + backward, for one example and for batches:
`scripts/benchmark.py --benchmarks crossover` does it again. A GPU or TPU has not been measured:
there, the materialised form is kept until memory speaks against it.
"""

from __future__ import annotations

import math
import sys

from jax.export import is_symbolic_dim

from attention_jax.implementations.contract import BlockSizes, Inputs
from attention_jax.scores import Score

# A score's `tile_cost` -> T S of one example from which tiles are faster, alone and in a batch of
# 64. (Just below it, tiles are faster alone and slower in the batch.)
TILED_FROM = {"elementwise": 2**10, "matmul": 2**18, "materialized": 2**16}
TILED_FROM_IN_ALL = 2**27  # pairs of all examples together, for memory: 512 MiB of float32 logits

LARGEST_BLOCK = {"elementwise": 1024, "matmul": 512, "materialized": 512}
TILE_PAIRS = 2**20  # of all examples together: a few MiB for each array of a tile
SMALLEST_BLOCK = 64

# A program that `jax.export` makes for any batch size is made for this many examples per axis.
EXAMPLES_OF_ANY_BATCH = 8


def chosen_implementation(score: Score, inputs: Inputs, backend: str) -> str:
    """The name of the implementation that serves these inputs fastest.

    Args:
        score: the score.
        inputs: with batch axes.
        backend: as `jax.default_backend()` says it.
    """
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if is_symbolic_dim(target_length) or is_symbolic_dim(source_length):
        return "reference"  # how many tiles there are is not known
    pairs = target_length * source_length
    large = _examples(inputs) * pairs >= TILED_FROM_IN_ALL
    faster = backend == "cpu" and pairs >= TILED_FROM[score.tile_cost]
    return "tiled" if large or faster else "reference"


def chosen_block_sizes(score: Score, inputs: Inputs) -> BlockSizes:
    """Tiles as large as pays, smaller where many examples share the loop."""
    cost = score.tile_cost
    pairs = TILE_PAIRS // max(_examples(inputs), 1)
    if cost == "materialized":
        # Its `pair`, or the gradient of it, may hold a tile of vectors: [t, s, D].
        pairs //= inputs.key.shape[-1]
    # A tile much wider than a sliding window is mostly masked.
    window = sys.maxsize if inputs.mask is None else inputs.mask.most_keys()
    size = min(LARGEST_BLOCK[cost], max(window // 4, 2 * SMALLEST_BLOCK))
    size = 2 ** (size.bit_length() - 1)
    while size > SMALLEST_BLOCK and size * size > pairs:
        size //= 2
    return BlockSizes(query=size, key=size)


def _examples(inputs: Inputs) -> int:
    """How many examples the batch has."""
    batch = inputs.query.shape[:-2]
    return math.prod(EXAMPLES_OF_ANY_BATCH if is_symbolic_dim(size) else size for size in batch)
