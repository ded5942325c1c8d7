"""The choice of implementation and tile sizes that a call leaves open, by score, size and backend.

`TABLES` has an entry for each kind of device that differs from `Table()`. The numbers of a CPU were
measured on 2 cores, float32, forward + backward, for single examples and for batches, with
"reference" and "tiled" in turns. GPU, TPU and other devices were not measured: "reference" is
chosen until its logits take too much memory.

`None` chooses no kernel that has not been run on its hardware. cuDNN's attention, XLA's own path on
an NVIDIA GPU, is chosen there wherever it can serve.
"""

import dataclasses
import functools
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.meshes import explicit_spec
from attention_jax.core.names import is_of_library
from attention_jax.kernels import CHOOSE_TILES, cudnn
from attention_jax.parts import Known
from attention_jax.scores import Score, TileCost
from attention_jax.scores.projected_keys import key_feature_shapes
from attention_jax.tiles.features import may_have_infinite_slopes
from attention_jax.tiles.options import BlockSizes, Inputs, Options


def _by_cost(elementwise: int, matmul: int, materialized: int) -> dict[TileCost, int]:
    return {"elementwise": elementwise, "matmul": matmul, "materialized": materialized}


class Table(NamedTuple):
    """The sizes from which one kind of device works in tiles, and those of the tiles.

    The defaults were not measured, and take little memory. Compiled for a v5e, scaled dot in
    bfloat16 with 16 heads of 2,048 tokens takes 385 MiB of temporaries and 7.6 million cycles with
    "reference", 0.7 MiB and 6.2 million with "tiled".
    """

    # For each `tile_cost`, numbers of the whole batch from which tiles are used for memory: one for
    # each pair, or one for each pair and feature where a score materialises these.
    tiled_from_in_all: dict[TileCost, int] = _by_cost(2**26, 2**26, 2**26)
    # The T S of one example from which tiles are faster, alone and in a batch of 64. (Just below
    # it, tiles are faster alone and slower in the batch.) {} where that was not measured.
    tiled_from: dict[TileCost, int] = {}  # noqa: RUF012
    # The largest number of queries, and of keys, in a square tile.
    largest_block: dict[TileCost, int] = _by_cost(1024, 512, 512)
    # Such numbers of a square tile, over the whole batch: a few MiB for each array.
    tile_pairs: int = 2**20
    # How many times as many queries as keys a tile has, where the score is a product of features
    # and there is no mask.
    queries_per_key: int = 1


TABLES = {
    # Measured. Gradients of an array for each pair and feature are faster in tiles once it is
    # larger than the caches; other tiles are for memory, 512 MiB of float32. Tiles of 4 times as
    # many queries as keys take 0.79 to 0.91 of the time of square ones.
    "cpu": Table(_by_cost(2**27, 2**27, 2**24), _by_cost(2**10, 2**18, 2**16), queries_per_key=4),
    # Not measured. A GPU computes 2^20 pairs in microseconds, less than the launch of the kernels
    # of a tile takes. 2^24 pairs are 64 MiB for each array.
    "gpu": Table(_by_cost(2**27, 2**27, 2**27), {}, _by_cost(1024, 2048, 512), 2**24),
}
SMALLEST_BLOCK = _by_cost(elementwise=64, matmul=64, materialized=16)

# Measured on a CPU, from S = 64 T on, as in decoding, "reference" is 1.3 to 5 times as fast as
# tiles (except for elementwise scores, which are as fast either way), and its memory is that of the
# keys.
KEYS_PER_QUERY = 64

# The tiles of keys to which few queries attend, if these tiles then have no more pairs than others.
MOST_TILES = 64

# The size assumed for a symbolic batch axis, when `jax.export` compiles for any batch size.
EXAMPLES_OF_ANY_BATCH = 8


def choose(
    implementation: str | None, options: Options, inputs: Inputs, backend: str
) -> tuple[str, Options]:
    """What a call leaves open: (the implementation's name, the options with tile sizes).

    Args:
        implementation: a name that is kept, or None.
        options: those of the call; their block sizes are kept unless they are None.
        inputs: with batch axes.
        backend: as `core.products.current_backend` returns it.
    """
    if implementation is None and backend == "gpu":
        served = not _divides_sharers(inputs) and cudnn.reason_against(options, inputs) is None
        implementation = "cudnn" if served else None
    if implementation is None:
        implementation = _portable_implementation(options.score, inputs, backend)
    if options.block_sizes is not None or implementation in CHOOSE_TILES:
        return implementation, options
    sizes = chosen_block_sizes(options.score, inputs, backend)
    return implementation, dataclasses.replace(options, block_sizes=sizes)


def _divides_sharers(inputs: Inputs) -> bool:
    """Whether examples that share keys may be on different devices, which JAX's call refuses.

    Explicit axes tell; of other meshes, it is assumed that they divide the first batch axis.
    """
    *batch, _, _ = inputs.query.shape
    tokens = inputs.key.shape[:-2], inputs.value.shape[:-2]
    key_batch = jnp.broadcast_shapes((1,) * len(batch), *tokens)
    divided = [name is not None for name in explicit_spec(inputs.query)[:-2]]
    divided[:1] = [jax.device_count() > 1] * len(divided[:1])
    return any(divided[axis] and key_batch[axis] != size for axis, size in enumerate(batch))


def _portable_implementation(score: Score, inputs: Inputs, backend: str) -> str:
    """The name of the faster implementation, or of "tiled" where logits take too much memory."""
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if is_symbolic_dim(target_length) or is_symbolic_dim(source_length):
        return "reference"  # the number of tiles is unknown
    table, cost = TABLES.get(backend, Table()), score.tile_cost
    pairs = target_length * source_length
    numbers = pairs * _numbers_of_a_pair(cost, score, inputs)
    few_queries = cost != "elementwise" and KEYS_PER_QUERY * target_length <= source_length
    if few_queries and numbers < sum(_num_entries(a.shape) for a in (inputs.key, inputs.value)):
        return "reference"
    large = numbers >= table.tiled_from_in_all[cost]
    faster = pairs >= table.tiled_from.get(cost, math.inf)
    return "tiled" if large or faster else "reference"


def chosen_block_sizes(score: Score, inputs: Inputs, backend: str) -> BlockSizes:
    """The tile sizes for these inputs; a large batch gets small tiles."""
    table, cost = TABLES.get(backend, Table()), score.tile_cost
    sizes = inputs.query.shape[-1], inputs.key.shape[-1]
    if inputs.mask is not None and may_have_infinite_slopes(score, inputs.params, *sizes):
        cost = "materialized"  # tokens of hidden pairs are replaced for each pair and feature
    numbers = _numbers_of_a_pair(cost, score, inputs)
    # Most of a tile that is much wider than a sliding window is masked.
    window = sys.maxsize if inputs.mask is None else inputs.mask.most_keys()
    size = min(table.largest_block[cost], max(window // 4, 128))
    size = 2 ** (size.bit_length() - 1)
    while size > SMALLEST_BLOCK[cost] and size * size * numbers > table.tile_pairs:
        size //= 2
    is_tall = cost == "matmul" and inputs.mask is None
    query = size * (table.queries_per_key if is_tall else 1)
    target_length, source_length = inputs.query.shape[-2], inputs.key.shape[-2]
    if is_symbolic_dim(target_length) or is_symbolic_dim(source_length) or window < sys.maxsize:
        return BlockSizes(query, size)
    # Few queries get few tiles: the sum over tiles is a running sum, whose error grows with them.
    most_keys = size * query // min(query, max(target_length, 1))
    return BlockSizes(query, max(size, min(most_keys, -(-source_length // MOST_TILES))))


def _numbers_of_a_pair(cost: TileCost, score: Score, inputs: Inputs) -> int:
    """Those of each example: F where `pair` or its gradient may keep [t, s, F], otherwise 1."""
    examples = _num_entries(inputs.query.shape[:-2])
    if cost != "materialized":
        return examples
    query_dim, key_dim = inputs.query.shape[-1], inputs.key.shape[-1]
    score = score.part if type(score) is Known else score  # its program has just been traced
    if type(score).project_key is Score.project_key:
        return examples * key_dim
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(inputs.params))
    structure = jax.tree.structure(inputs.params)
    # A user's score may hold arrays, which a cache would keep.
    count = _num_features if is_of_library(score) else _num_features.__wrapped__
    return examples * count(score, structure, shapes, query_dim, key_dim)


@functools.lru_cache(maxsize=256)
def _num_features(score: Score, structure: Any, shapes: Any, query_dim: int, key_dim: int) -> int:
    params = structure.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    features = key_feature_shapes(score, params, query_dim, key_dim, 1)
    return sum(leaf.size for leaf in jax.tree.leaves(features))


def _num_entries(shape: tuple[Any, ...]) -> int:
    return math.prod(EXAMPLES_OF_ANY_BATCH if is_symbolic_dim(size) else size for size in shape)
