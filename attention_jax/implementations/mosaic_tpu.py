"""Attention by Pallas kernels on a TPU, for every score whose `pair` Mosaic can lower.

The inputs are prepared as for `tiled`, and the results and derivatives are the same: reverse mode
by a kernel, all other derivatives from `plain_tiles`. The logits never leave the chip: memory is
linear in T and S.

On other devices it raises NotImplementedError, except under
`jax.experimental.pallas.tpu.force_tpu_interpret_mode(True)`, in which the kernels are interpreted.

Source: Dao et al. 2022, algorithms 1 and 4.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.implementations import mosaic_tpu_kernels as kernels
from attention_jax.implementations import mosaic_tpu_operands as operand_blocks
from attention_jax.implementations import tile_arrays, tiled, tiling
from attention_jax.implementations.contract import BlockSizes, Inputs, Options, results
from attention_jax.implementations.kernel_rule import KernelPlan, attention_by_kernels
from attention_jax.implementations.mosaic_tpu_calls import (
    lowering_settings,
    run_backward,
    run_forward,
)
from attention_jax.implementations.tiled import Residuals
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.normalizers import AttentionStatistics, FinalRows, RowShift, RowSums, Softmax

Array = jax.Array

MOST_STEPS = 2**16  # of one example with a mask: two numbers each in scalar memory, of 1 MiB


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in float32.

    Raises:
        NotImplementedError: the kernels cannot serve this call; the message says why.
    """
    target_length = inputs.query.shape[0]
    if 0 in (target_length, *inputs.value.shape):
        return tiled.attend(options, inputs)  # no kernel has a tile without entries
    rows = attend_tiles(*_prepare(options, inputs))
    output, summary = jax.tree.map(lambda tiles: tile_arrays.untiled(tiles, target_length), rows)
    return results(options, inputs, output, summary)


def reason_against(options: Options, inputs: Inputs) -> str | None:
    """Why the kernels cannot serve one example, forward or backward; None if they can.

    The inputs may be types of arrays. JAX lowers both kernels for a TPU; nothing is compiled.
    """
    leaves, structure = jax.tree.flatten(inputs)
    types = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _reason_against(options, structure, types, lowering_settings())


@functools.lru_cache(maxsize=256)
def _reason_against(
    options: Options, structure: Any, types: tuple[Any, ...], settings: tuple[Any, ...]
) -> str | None:
    del settings  # those of this moment

    def both_passes(*leaves: Array) -> None:
        plan, arrays, constants = _prepare(options, jax.tree.unflatten(structure, leaves))
        rows = _forward(plan, arrays, constants)
        zeros = jax.tree.map(jnp.zeros_like, (rows.output, rows.summary))
        _backward(plan, Residuals(arrays, constants, rows), zeros)

    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            jax.eval_shape(both_passes, *types)
    except NotImplementedError as error:
        return str(error)
    return None


def _prepare(options: Options, inputs: Inputs) -> tuple[KernelPlan, Arrays, Constants]:
    """The arguments of `attend_tiles`."""
    if inputs.compute_dtype == jnp.float64:
        _refuse("a TPU has no float64")
    if type(options.normalizer) is not Softmax:
        _refuse(f"its kernels compute a softmax, not {options.normalizer}")
    if inputs.damping is not None:
        _refuse("its kernels do not multiply weights by a Gaussian")
    plan = _make_plan(options, *(array.shape[0] for array in (inputs.query, inputs.key)))
    _, arrays, constants = tiling.prepare(options, inputs, plan)
    # Not those of `tile_params`: a kernel's `pair` decides nothing for the whole batch.
    arrays = arrays._replace(params=cast_floats(inputs.params, inputs.compute_dtype))
    if constants.stand_ins is not None:
        padding = " (a length that is no multiple of the tile counts as one)"
        padding = padding if inputs.mask is None else ""
        _refuse(
            f"the pair of {options.score} may have an infinite slope where the mask{padding} hides"
            " a pair; set finite_slopes = True in the score if it has none"
        )
    query_dtype = inputs.query.dtype
    output_dtype = jnp.dtype(jnp.float32) if query_dtype == jnp.float16 else query_dtype
    return KernelPlan(plan, output_dtype), _without_float16(arrays), constants


def _refuse(reason: str) -> None:
    raise NotImplementedError(f"implementation 'mosaic_tpu': {reason}: use 'tiled'")


def _make_plan(options: Options, query_length: int, key_length: int) -> Plan:
    """Tiles of whole vector registers, unless `options.block_sizes` are smaller."""
    if is_symbolic_dim(query_length) or is_symbolic_dim(key_length):
        _refuse(f"needs known lengths; got T = {query_length}, S = {key_length}")
    plan = tiling.make_plan(options, query_length, key_length)

    def size(length: int, block: int, even: int) -> int:
        if block < kernels.LANES:
            return even
        whole = kernels.LANES
        count = math.ceil(length / (block // whole * whole))
        return whole * math.ceil(length / (count * whole))

    blocks = options.block_sizes
    tile = BlockSizes(
        size(query_length, blocks.query, plan.tile.query),
        size(key_length, blocks.key, plan.tile.key),
    )
    counts = math.ceil(query_length / tile.query), math.ceil(key_length / tile.key)
    if math.prod(counts) > MOST_STEPS:
        raise NotImplementedError(
            f"implementation 'mosaic_tpu': {counts[0]} x {counts[1]} tiles are more than"
            f" {MOST_STEPS}: give attention larger block_sizes"
        )
    return Plan(options, tile, *counts)


def _without_float16(arrays: Arrays) -> Arrays:
    """The arrays with float32 in place of float16, which a TPU does not have."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf, arrays
    )


# --- the two passes, of which `attend_tiles` is made below ---


def _forward(plan: KernelPlan, arrays: Arrays, constants: Constants) -> FinalRows:
    programs = operand_blocks.programs_of(plan.plan, arrays, constants)
    operands = operand_blocks.operands_of(programs, arrays, constants)
    schedule = operand_blocks.schedule_of(plan.plan, constants)
    output, *sums = run_forward(programs, plan.output_dtype, (schedule, operands))

    def finalize(largest: Array, total: Array, excess: Array | None) -> FinalRows:
        nothing = jnp.zeros((largest.shape[0], 0), largest.dtype)
        row_sums = RowSums(RowShift(largest), total, nothing, excess)
        return row_sums.finalize(Softmax())

    row_sums: Any = [None if row is None else row[:, 0, :] for row in sums]
    return jax.vmap(finalize)(*row_sums)._replace(output=output)


def _backward(plan: KernelPlan, residuals: Residuals, cotangents: Any) -> Arrays:
    arrays, constants, rows = residuals
    programs = operand_blocks.programs_of(plan.plan, arrays, constants)
    operands, pull_back = jax.vjp(
        lambda arrays: operand_blocks.operands_of(programs, arrays, constants), arrays
    )
    schedule = operand_blocks.schedule_of(plan.plan, constants)
    doutput, dsummary = cotangents
    empty = rows.empty
    assert rows.divisor is not None
    offset = -jnp.sum(doutput.astype(jnp.float32) * rows.output.astype(jnp.float32), axis=-1)
    offset = offset + dsummary.log_sum
    dentropy = None
    if rows.summary is not None and rows.summary.entropy is not None:
        dentropy = jnp.where(empty, 0, dsummary.entropy)
        offset = offset - dentropy * (rows.summary.entropy - rows.summary.log_sum)
        dentropy = dentropy / rows.divisor
    # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
    offset = jnp.where(empty, 0, offset / rows.divisor)
    terms = kernels.Rows(
        rows.shift.reference, jnp.where(empty, 0, 1 / rows.divisor), offset, dentropy
    )
    terms = jax.tree.map(lambda row: row[:, None, :], terms)
    gradients = run_backward(programs, (schedule, operands, terms, doutput))
    zeros = jax.tree.map(_zeros, operands)
    cotangents_of = {
        name: _or_zeros(getattr(zeros, name), gradient)
        for name, gradient in gradients._asdict().items()
    }
    (darrays,) = pull_back(zeros._replace(**cotangents_of))
    return darrays


def _zeros(leaf: Array) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _or_zeros(zeros: Any, gradients: Any) -> Any:
    """The gradients, with zeros for integers."""
    return jax.tree.map(
        lambda zero, gradient: zero if zero.dtype == jax.dtypes.float0 else gradient,
        zeros,
        gradients,
    )


attend_tiles = attention_by_kernels(_forward, _backward)
