"""Additive attention by Mosaic GPU kernels on an NVIDIA GPU of the Hopper generation.

The inputs are prepared as for `tiled`, and the results and derivatives are the same: reverse mode
by kernels, all other derivatives from `plain_tiles`. The logits never leave the registers: memory
is linear in T and S. Each pair costs half a reciprocal for each feature, see `weighted_tanh`.

What the kernels cannot do raises NotImplementedError before anything compiles: `reason_against`
lists it. So does another device, or an older GPU, except under JAX's interpreter of these kernels.

The kernels were interpreted and compiled, and never run on a GPU: `None` does not choose them.

Source: Dao et al. 2022, algorithms 1 and 4.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.core.backend import nvidia_generation
from attention_jax.core.varying import is_varying
from attention_jax.implementations import (
    tile_arrays,
    tiled,
    tiling,
)
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.implementations.tiled import Residuals
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.kernels.kernel_rule import KernelPlan, attention_by_kernels
from attention_jax.kernels.mosaic_gpu import calls, weighted_tanh
from attention_jax.kernels.mosaic_gpu import windows as window_tiles
from attention_jax.kernels.mosaic_gpu.kernels import Shared, Side
from attention_jax.kernels.mosaic_gpu.registers import ROWS
from attention_jax.kernels.mosaic_gpu.weighted_tanh import TokenFeatures, TokenGradients
from attention_jax.kernels.score_forms import form_of
from attention_jax.normalizers import AttentionStatistics, FinalRows, Softmax
from attention_jax.normalizers.online_softmax import SoftmaxState
from attention_jax.scores import Additive, Params, Score

Array = jax.Array

HOPPER = 9.0  # its compute capability
MOST_SHARED_MEMORY = 227 * 2**10  # bytes of a program on an H100


@functools.singledispatch
def sum_of_tanh(score: Score, params: Params) -> Array | None:
    """The weights v [F] if `pair` is sum_f v_f tanh(q_features_if + k_features_jf), else None."""
    return None


@sum_of_tanh.register
def _(score: Additive, params: Params) -> Array:
    return params["v"]


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in float32.

    Raises:
        NotImplementedError: the kernels cannot serve this call; the message says why.
    """
    reason = reason_against(options, inputs)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_gpu': {reason}: use 'tiled'")
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    if 0 in (*lengths, inputs.value.shape[-1]):
        return tiled.attend(options, inputs)  # no kernel has a tile without entries
    tile = BlockSizes(ROWS, ROWS)
    query_tiles, key_tiles = (math.ceil(length / ROWS) for length in lengths)
    plan = Plan(options, tile, query_tiles, key_tiles)
    _, arrays, constants = tiling.prepare(options, inputs, plan)
    # Not those of `tile_params`: the kernels decide for each example.
    arrays = arrays._replace(params=cast_floats(inputs.params, inputs.compute_dtype))
    output, statistics = jax.tree.map(
        lambda tiles: tile_arrays.untiled(tiles, lengths[0]),
        attend_tiles(KernelPlan(plan, inputs.query.dtype), arrays, constants),
    )
    return output, statistics


def reason_against(options: Options, inputs: Inputs) -> str | None:
    """Why the kernels cannot compute one example; None if they can. Nothing is compiled."""
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    generation = nvidia_generation()
    if generation is not None and generation < HOPPER:
        return f"its kernels need a Hopper GPU, of compute capability {HOPPER}; got {generation}"
    weights = form_of(sum_of_tanh, options.score, inputs.params)
    if weights is None:
        return f"its kernels compute additive attention, not {options.score}"
    if inputs.compute_dtype == jnp.float64:
        return "its kernels compute in float32, not in float64"
    if options.normalizer != Softmax():
        return f"its kernels compute a softmax without a sink, not {options.normalizer}"
    if options.dropout_rate > 0:
        return f"its kernels have no dropout; got dropout_rate {options.dropout_rate}"
    if inputs.bias is not None:
        return "its kernels have no bias; got one"
    if inputs.damping is not None:
        return "its kernels do not multiply weights by a Gaussian"
    if any(is_symbolic_dim(length) for length in lengths):
        return f"it needs known lengths; got T = {lengths[0]}, S = {lengths[1]}"
    needed = calls.shared_memory(weights.shape[0], inputs.value.shape[-1])
    if needed > MOST_SHARED_MEMORY:
        return (
            f"{weights.shape[0]} features and {inputs.value.shape[-1]} values take"
            f" {needed // 1024} KiB of shared memory, more than {MOST_SHARED_MEMORY // 1024}"
        )
    if is_varying(inputs):
        return "inside jax.shard_map it needs check_vma=False"
    mask_reason = window_tiles.reason_against_mask(inputs.mask)
    return mask_reason and f"it {mask_reason}"


# --- the two passes, of which `attend_tiles` is made below ---


class Operands(NamedTuple):
    """What all kernels read."""

    features: TokenFeatures
    values: Array  # float32 [Dv, S]
    windows: Array  # int32 [2, T]
    visits: tuple[Array, Array]  # of the tiles of queries, and of the tiles of keys

    def shared(self, side: int) -> Shared:
        """What every program reads; `side` is 0 for tiles of queries, 1 for tiles of keys."""
        return Shared(self.features.weights, self.features.small, self.visits[side])


def _operands(plan: KernelPlan, arrays: Arrays, constants: Constants) -> Operands:
    lengths = plan.plan.padded_lengths
    windows = window_tiles.windows(constants.mask, *lengths)
    weights = form_of(sum_of_tanh, plan.plan.options.score, arrays.params)
    assert weights is not None  # `reason_against` refuses other scores
    return Operands(
        weighted_tanh.token_features(weights, _flat(arrays.queries), _flat(arrays.keys)),
        _flat(arrays.values).astype(jnp.float32).T,
        windows,
        window_tiles.visits(windows, plan.plan.key_tiles, ROWS),
    )


def _flat(tiles: Array) -> Array:
    """[tiles, t, D] -> [length, D]"""
    return tiles.reshape(-1, tiles.shape[-1])


def _forward(plan: KernelPlan, arrays: Arrays, constants: Constants) -> FinalRows:
    operands = _operands(plan, arrays, constants)
    output, sums = calls.run_forward(
        plan.plan.options.return_statistics,
        calls.ForwardArrays(
            operands.shared(0),
            Side(operands.features.queries, None, None, operands.windows),
            Side(operands.features.keys, operands.values, None, None),
        ),
    )
    nothing = jnp.zeros((sums.shape[1], 0), jnp.float32)
    excess = sums[2] if plan.plan.options.return_statistics else None
    state = SoftmaxState(sums[0], sums[1], nothing, excess)
    rows = state.finalize(plan.plan.options.normalizer, arrays.normalizer_params)
    rows = rows._replace(output=output.T.astype(plan.output_dtype))
    return jax.tree.map(lambda row: tile_arrays.tiled(row, plan.plan.query_tiles), rows)


def _backward(plan: KernelPlan, residuals: Residuals, cotangents: Any) -> Arrays:
    arrays, constants, rows = residuals
    numbers, doutput, drows = _row_terms(rows, cotangents)
    operands = _operands(plan, arrays, constants)
    of_queries, of_keys = calls.run_backward(
        calls.BackwardArrays(
            operands.shared(0),
            operands.shared(1),
            Side(operands.features.queries, _flat(doutput).T, numbers, operands.windows),
            Side(operands.features.keys, operands.values, None, None),
        )
    )
    weights_of = functools.partial(form_of, sum_of_tanh, plan.plan.options.score)
    weights, pull_back_weights = jax.vjp(weights_of, arrays.params)
    dweights, dqueries, dkeys = weighted_tanh.pull_back(
        weights, TokenGradients(of_queries.slopes, of_keys.slopes, of_queries.inverses), drows
    )
    zeros = jax.tree.map(jnp.zeros_like, arrays)
    gradients = zeros._replace(
        queries=dqueries.reshape(arrays.queries.shape),
        keys=dkeys.reshape(arrays.keys.shape),
        values=of_keys.vectors.T.reshape(arrays.values.shape),
        params=pull_back_weights(dweights.astype(weights.dtype))[0],
    )
    return jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), gradients, arrays)


def _row_terms(rows: FinalRows, cotangents: Any) -> tuple[Array, Array, Array]:
    """(numbers [n, T] of the kernels, doutput [query_tiles, t, Dv] over divisor, drows [T])"""
    doutput, dstatistics = cotangents
    empty, divisor = rows.empty, rows.divisor
    assert divisor is not None  # softmax has one
    # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
    doutput = jnp.where(empty[..., None], 0, doutput.astype(jnp.float32))
    offset = -jnp.sum(doutput * rows.output.astype(jnp.float32), axis=-1)
    drows, terms = jnp.zeros_like(offset), []
    if rows.statistics is not None:
        drows = jnp.where(empty, 0, dstatistics.logsumexp)
        dentropy = jnp.where(empty, 0, dstatistics.entropy)
        offset = offset + drows - dentropy * (rows.statistics.entropy - jnp.log(divisor))
        terms = [dentropy / divisor]
    numbers = jnp.stack([rows.shift.reference, offset / divisor, *terms])
    return numbers.reshape(len(numbers), -1), doutput / divisor[..., None], drows.reshape(-1)


attend_tiles = attention_by_kernels(_forward, _backward)
