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
from attention_jax.implementations import tile_arrays, tiled, tiling
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.implementations.tiled import Residuals
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.kernels.kernel_rule import KernelPlan, attention_by_kernels
from attention_jax.kernels.mosaic_tpu import kernels
from attention_jax.kernels.mosaic_tpu import operands as operand_blocks
from attention_jax.kernels.mosaic_tpu.calls import (
    lowering_settings,
    run_backward,
    run_forward,
)
from attention_jax.normalizers import AttentionStatistics, FinalRows, Softmax
from attention_jax.normalizers.online_softmax import SoftmaxState

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
    output, statistics = attend_tiles(*_prepare(options, inputs))
    output, statistics = jax.tree.map(
        lambda tiles: tile_arrays.untiled(tiles, target_length), (output, statistics)
    )
    return output.astype(inputs.query.dtype), statistics


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
        results = rows.output, rows.statistics
        _backward(plan, Residuals(arrays, constants, rows), jax.tree.map(jnp.zeros_like, results))

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
    normalizer, params = plan.plan.options.normalizer, arrays.normalizer_params

    sink = normalizer.sink_logit(params)

    def finalize(largest: Array, total: Array, excess: Array | None) -> Any:
        """The results of the rows, and what the keys' weights sum to beside the sink's."""
        nothing = jnp.zeros((largest.shape[0], 0), largest.dtype)
        state = SoftmaxState(largest, total, nothing, excess)
        if sink is not None:
            state = _with_sink(state, sink)
        rows = state.finalize(normalizer, params)
        assert rows.divisor is not None  # softmax has one
        return rows, jnp.where(rows.empty, 0, state.normalizer / rows.divisor)

    row_sums: Any = [None if row is None else row[:, 0, :] for row in sums]
    rows, share = jax.vmap(finalize)(*row_sums)
    if sink is not None:
        # The kernel divides by the sum without the sink.
        output = (output * share[..., None]).astype(output.dtype)
    return rows._replace(output=output)


def _with_sink(state: SoftmaxState, sink: Array) -> SoftmaxState:
    """The sums relative to the larger of the keys' largest logit and the sink's logit."""
    largest = jnp.maximum(state.largest, sink)
    shrink = jnp.exp(state.largest - largest)
    excess = state.excess
    if excess is not None:
        drop = jnp.where(shrink > 0, state.largest - largest, 0)
        excess = shrink * (excess + drop * state.normalizer)
    return state._replace(
        largest=largest,
        normalizer=shrink * state.normalizer,
        excess=excess,
        largest_of_keys=jnp.where(state.normalizer == 0, -jnp.inf, state.largest),
    )


def _backward(plan: KernelPlan, residuals: Residuals, cotangents: Any) -> Arrays:
    arrays, constants, rows = residuals
    programs = operand_blocks.programs_of(plan.plan, arrays, constants)
    operands, pull_back = jax.vjp(
        lambda arrays: operand_blocks.operands_of(programs, arrays, constants), arrays
    )
    schedule = operand_blocks.schedule_of(plan.plan, constants)
    doutput, dstatistics = cotangents
    empty = rows.empty
    assert rows.divisor is not None
    offset = -jnp.sum(doutput.astype(jnp.float32) * rows.output.astype(jnp.float32), axis=-1)
    dentropy = None
    if rows.statistics is not None:
        dentropy = jnp.where(empty, 0, dstatistics.entropy)
        constant = rows.statistics.entropy - jnp.log(rows.divisor)
        offset = offset + dstatistics.logsumexp - dentropy * constant
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
    sink = plan.plan.options.normalizer.sink_logit(arrays.normalizer_params)
    if sink is not None:
        dsink = _sink_gradient(sink, rows, offset, dentropy)
        darrays = darrays._replace(normalizer_params={"sink": dsink})
    return darrays


def _sink_gradient(sink: Array, rows: FinalRows, offset: Array, dentropy: Array | None) -> Array:
    """The gradient of the logit of the sink, a key whose value is 0."""
    shifted = sink - rows.shift.reference
    weights = jnp.exp(shifted)
    if dentropy is not None:
        offset = offset - dentropy * jnp.where(weights > 0, shifted, 0)
    return jnp.sum(weights * offset)


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
