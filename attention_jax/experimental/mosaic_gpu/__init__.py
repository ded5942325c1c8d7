"""Additive attention by Mosaic GPU kernels on an NVIDIA GPU of the Hopper generation.

The logits never leave the registers: memory is linear in T and S. Each pair costs half a reciprocal
for each feature, see `tanh_quotients`. What the kernels cannot do raises NotImplementedError before
anything compiles, and so does another device, or an older GPU, except under JAX's interpreter.

The kernels were interpreted, compiled, and run on a GPU in two cases, which were right. They were
never timed: `None` does not choose them.

Source: Dao et al. 2022, algorithms 1 and 4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_axes
from attention_jax.experimental.kernel_attention import KernelPlan, Kernels, RowTerms, attention_by
from attention_jax.experimental.mosaic_gpu import calls, tanh_quotients
from attention_jax.experimental.mosaic_gpu.kernels import (
    BackwardResults,
    KernelInputs,
    SideArrays,
    backward_kernel,
    forward_kernel,
)
from attention_jax.experimental.mosaic_gpu.registers import ROWS
from attention_jax.experimental.score_forms import form_of
from attention_jax.experimental.visible_keys import VisibleKeys, ranges, visible_keys
from attention_jax.kernels.cudnn import nvidia_generation
from attention_jax.kernels.preparation import reason_against_call
from attention_jax.kernels.windows import windows_of
from attention_jax.normalizers.softmax_rows import SoftmaxSums
from attention_jax.scores import Additive, Params, Score
from attention_jax.tiles.features import Operands
from attention_jax.tiles.options import Inputs, Options

Array = jax.Array

HOPPER = 9.0  # its compute capability
MOST_SHARED_MEMORY = 227 * 2**10  # bytes of a program on an H100


@functools.singledispatch
def sum_of_tanh(score: Score, params: Params) -> Array | None:
    """The weights v [F] if `pair` is sum_f v_f tanh(q_features_if + k_features_jf), else None."""
    return None


@sum_of_tanh.register
def _(score: Additive, params: Params) -> Array | None:
    return params["v"] if score.key_part else None


def _reason_against(options: Options, inputs: Inputs) -> str | None:
    generation = nvidia_generation()
    if generation is not None and generation < HOPPER:
        return f"needs a Hopper GPU, of compute capability {HOPPER}; got {generation}"
    weights = form_of(sum_of_tanh, options.score, inputs.params)
    if weights is None:
        return f"computes additive attention, not {options.score}"
    if inputs.compute_dtype == jnp.float64:
        return "computes in float32, not in float64"
    if reason := reason_against_call(options, inputs):
        return reason
    needed = calls.shared_memory(weights.shape[0], inputs.value.shape[-1])
    if needed > MOST_SHARED_MEMORY:
        return (
            f"keeps {weights.shape[0]} features and {inputs.value.shape[-1]} values of a tile in"
            f" {needed // 1024} KiB of shared memory, more than {MOST_SHARED_MEMORY // 1024}"
        )
    return "needs check_vma=False inside jax.shard_map" if varying_axes(inputs) else None


def _kernel_arrays(
    plan: KernelPlan, operands: Operands, visible: VisibleKeys | None
) -> tuple[KernelInputs, KernelInputs, SideArrays, SideArrays]:
    """What the forward kernel reads, and the backward kernels too.

    Returns:
        the features' weights with the visits of the tiles of queries, and with those of keys; the
        queries and the keys.
    """
    windows, visited, _ = visible or visible_keys(plan, None, windows_of(None, *plan.lengths))
    v = form_of(sum_of_tanh, plan.options.score, operands.params)
    features = tanh_quotients.token_features(v, operands.queries, operands.keys)
    weights, small, queries, keys = features
    return (
        KernelInputs(weights, small, ranges(visited)),
        KernelInputs(weights, small, ranges(visited.T)),
        SideArrays(queries, None, None, jnp.stack(windows[:2])),
        SideArrays(keys, operands.values.astype(jnp.float32).T, None, None),
    )


def _forward(
    plan: KernelPlan, operands: Operands, visible: VisibleKeys | None
) -> tuple[Array, SoftmaxSums]:
    of_queries, _, queries, keys = _kernel_arrays(plan, operands, visible)
    results = operands.values.shape[1], 3 if plan.options.return_statistics else 2
    output, (largest, total, *moment) = calls.run_kernel(
        forward_kernel, "attention_forward", of_queries, queries, keys, results
    )
    return output.T.astype(plan.output_dtype), SoftmaxSums(largest, total, *moment or [None])


def _backward(
    plan: KernelPlan, operands: Operands, visible: VisibleKeys | None, terms: RowTerms
) -> Operands:
    of_queries, of_keys, queries, keys = _kernel_arrays(plan, operands, visible)
    queries = queries._replace(
        vectors=terms.doutput.T, numbers=jnp.stack(jax.tree.leaves(terms[:3]))
    )
    count, value_dim = queries.features.shape[0], operands.values.shape[1]

    def sums(name: str, own_keys: bool, *arrays: Any) -> BackwardResults:
        kernel = functools.partial(backward_kernel, own_keys)
        return calls.run_kernel(kernel, f"attention_gradient_of_{name}", *arrays)

    of_rows = sums("queries", False, of_queries, queries, keys, BackwardResults(count, count, None))
    of_columns = sums("keys", True, of_keys, keys, queries, BackwardResults(count, None, value_dim))
    weights, pull_back = jax.vjp(
        functools.partial(form_of, sum_of_tanh, plan.options.score), operands.params
    )
    slopes = of_rows.slopes, of_columns.slopes
    dweights, dqueries, dkeys = tanh_quotients.pull_back_sums(
        weights, slopes, of_rows.inverses, terms.dlogsumexp
    )
    gradients = Operands(dqueries, dkeys, of_columns.vectors.T, *pull_back(dweights))
    return jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), gradients, operands)


_KERNELS = Kernels("mosaic_gpu", _reason_against, lambda *_: (ROWS, ROWS), _forward, _backward)
attend = functools.partial(attention_by, _KERNELS)
