"""Attention by Pallas kernels on a TPU, for every score whose `pair` Mosaic can lower.

The logits never leave the chip: memory is linear in T and S. The masks are windows of consecutive
keys, and segments. What the kernels cannot serve raises NotImplementedError, and so does another
device, except under `jax.experimental.pallas.tpu.force_tpu_interpret_mode(True)`, in which the
kernels are interpreted.

The kernels were interpreted and compiled, and never run on a TPU: `None` does not choose them.

Source: Dao et al. 2022, algorithms 1 and 4.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.experimental.kernel_attention import KernelPlan, Kernels, RowTerms, attention_by
from attention_jax.experimental.mosaic_tpu import calls
from attention_jax.experimental.mosaic_tpu.operands import (
    LANES,
    kernel_blocks,
    operands_in_tiles,
    rows_in_tiles,
    tile_program,
)
from attention_jax.experimental.visible_keys import VisibleKeys
from attention_jax.kernels.preparation import reason_against_call
from attention_jax.normalizers.softmax_rows import SoftmaxSums
from attention_jax.scores import TileCost
from attention_jax.tiles.features import Operands, may_have_infinite_slopes
from attention_jax.tiles.options import BlockSizes, Inputs, Options
from attention_jax.tiles.prepare import cut

Array = jax.Array

# Queries and keys of a tile, by the compiler's count of their instructions
# (`benchmarks/compilation/README.md`).
TILES: dict[TileCost, BlockSizes] = {
    "matmul": BlockSizes(512, 512),
    "elementwise": BlockSizes(256, 512),
    "materialized": BlockSizes(128, 128),
}


def attend(options: Options, inputs: Inputs) -> Any:
    """One example; see `attention_by`."""
    if options.block_sizes is None:
        options = dataclasses.replace(options, block_sizes=TILES[options.score.tile_cost])
    return attention_by(_KERNELS, options, inputs)


def _reason_against(options: Options, inputs: Inputs) -> str | None:
    if reason := reason_against_call(options, inputs, segments=True):
        return reason
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((inputs.query, inputs.key, inputs.value))}
    names = ", ".join(sorted(dtype.name for dtype in dtypes))
    if inputs.compute_dtype == jnp.float64 or "float16" in names.split(", "):
        return f"needs tokens in float32 or bfloat16, as a TPU multiplies them; got {names}"
    sizes = inputs.query.shape[-1], inputs.key.shape[-1]
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    tile = _tile_lengths(options, *lengths)
    padded = any(n % size for n, size in zip(lengths, tile, strict=True))
    if (inputs.mask is not None or padded) and may_have_infinite_slopes(
        options.score, inputs.params, *sizes
    ):
        return (
            f"does not serve the pair of {options.score}, which may have an infinite slope where a"
            " mask hides a pair (a length that is no multiple of the tile counts as one); set"
            " finite_slopes = True in the score if it has none"
        )
    return None


def _tile_lengths(options: Options, target_length: int, source_length: int) -> tuple[int, int]:
    """Tiles of whole vector registers, as equal as can be."""

    def size(length: int, block: int) -> int:
        registers = max(math.ceil(length / LANES), 1)
        count = math.ceil(registers / max(block // LANES, 1))
        return LANES * math.ceil(registers / count)

    blocks = options.block_sizes
    return size(target_length, blocks.query), size(source_length, blocks.key)


def _forward(
    plan: KernelPlan, operands: Operands, visible: VisibleKeys | None
) -> tuple[Array, SoftmaxSums]:
    program = tile_program(plan, operands)
    blocks = kernel_blocks(plan, operands_in_tiles(program, operands), visible)
    output, sums = calls.run_call(calls.forward_call, program, blocks)
    return output.reshape(-1, output.shape[-1]), jax.tree.map(jnp.ravel, sums)


def _backward(
    plan: KernelPlan, operands: Operands, visible: VisibleKeys | None, terms: RowTerms
) -> Operands:
    program = tile_program(plan, operands)
    tiles, pull_back = jax.vjp(functools.partial(operands_in_tiles, program), operands)
    blocks = kernel_blocks(plan, tiles, visible)._replace(
        terms=rows_in_tiles(terms._replace(dlogsumexp=None, doutput=None), plan.query_tiles),
        doutput=cut(terms.doutput.astype(operands.values.dtype), plan.query_tiles),
    )
    calls.check_memory(blocks)
    (doperands,) = pull_back(calls.run_call(calls.backward_call, program, blocks))
    return doperands


_KERNELS = Kernels("mosaic_tpu", _reason_against, _tile_lengths, _forward, _backward)
