"""Which implementation and which tiles, where the caller leaves it open: all numbers stand here.

Measured on 2 CPU cores, float32, jax 0.10.2, forward + backward, for one example and for batches:
`scripts/benchmark.py --benchmarks crossover` does it again. A GPU or TPU has not been measured:
there, the materialised form is kept until memory speaks against it.
"""

from __future__ import annotations

import math
import sys

from attention_jax.implementations.contract import BlockSizes, Inputs
from attention_jax.mask_algebra import AndMask
from attention_jax.masks import LocalMask, Mask
from attention_jax.scores import Additive, Dot, Score

# Kind of score -> T S of one example from which tiles are faster, alone and in a batch of 64. (Just
# below it, tiles are faster alone and slower in the batch.)
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
    faster = backend == "cpu" and pairs >= TILED_FROM[kind_of(score)]
    return "tiled" if large or faster else "reference"


def chosen_block_sizes(score: Score, inputs: Inputs) -> BlockSizes:
    """Tiles as large as pays, smaller where many examples share the loop."""
    kind = kind_of(score)
    pairs = TILE_PAIRS // max(math.prod(inputs.query.shape[:-2]), 1)
    if kind == "other":
        # Its `pair`, or the gradient of it, may hold a tile of vectors: [t, s, D].
        pairs //= inputs.key.shape[-1]
    # A tile much wider than a sliding window is mostly masked.
    size = min(LARGEST_BLOCK[kind], max(_window(inputs.mask) // 4, 2 * SMALLEST_BLOCK))
    size = 2 ** (size.bit_length() - 1)
    while size > SMALLEST_BLOCK and size * size > pairs:
        size //= 2
    return BlockSizes(query=size, key=size)


def _window(mask: Mask | None) -> int:
    """How many keys a query sees at most, as far as the kind of mask tells."""
    if isinstance(mask, LocalMask) and mask.left is not None and mask.right is not None:
        return mask.left + mask.right + 1
    if isinstance(mask, AndMask):
        return min(_window(mask.left), _window(mask.right))
    return sys.maxsize


def kind_of(score: Score) -> str:
    """ "additive", "dot", or "other": what the time depends on is how `pair` is computed."""
    for kind, known in (("additive", Additive), ("dot", Dot)):
        if isinstance(score, known) and type(score).pair is known.pair:
            return kind
    return "other"
