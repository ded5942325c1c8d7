"""The calls of the GPU kernels: programs, memory, and where they may run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention_jax.core.backend import interpret_params
from attention_jax.core.only_on import only_on
from attention_jax.kernels.mosaic_gpu import kernels
from attention_jax.kernels.mosaic_gpu.kernels import (
    BackwardResults,
    ForwardResults,
    Shared,
    Side,
)
from attention_jax.kernels.mosaic_gpu.on_host import on_host
from attention_jax.kernels.mosaic_gpu.registers import ROWS
from attention_jax.kernels.mosaic_gpu.weighted_tanh import FEATURES_PER_STEP

Array = jax.Array


class ForwardArrays(NamedTuple):
    """The operands of the forward kernel."""

    shared: Shared
    queries: Side
    keys: Side


class BackwardArrays(NamedTuple):
    """The operands of both backward kernels."""

    of_queries: Shared  # with the visits of the tiles of queries
    of_keys: Shared
    queries: Side
    keys: Side


def run_forward(statistics: bool, arrays: ForwardArrays) -> ForwardResults:
    """The output [Dv, T], and the largest logit, the sum and the excess of each row, [3, T]."""
    return _run(_forward_call, arrays, statistics)


def run_backward(arrays: BackwardArrays) -> tuple[BackwardResults, BackwardResults]:
    """The sums of the queries, and those of the keys."""
    return _run(_backward_call, arrays)


OTHER_MEMORY = 8 * 2**10  # rows of numbers, barriers, and what Pallas keeps for itself


def shared_memory(features: int, value_dim: int) -> int:
    """The bytes of a program's memory that the larger of the backward kernels needs."""
    features += -features % FEATURES_PER_STEP
    rows = max(4 * features + 2 * value_dim, 3 * features + 3 * value_dim)
    return 4 * (ROWS * rows + features) + OTHER_MEMORY


def _run(call: Callable[..., Any], arrays: Any, *static: Any) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    interpret = _gpu_interpret_params()
    function = _function_of_leaves(call, structure, static, interpret)
    if interpret is not None:
        return on_host(function)(*leaves)
    leaves[0] = only_on("cuda", _REFUSAL, leaves[0])
    return function(*leaves)


@functools.lru_cache(maxsize=256)
def _function_of_leaves(
    call: Callable[..., Any], structure: Any, static: tuple, interpret: Any
) -> Callable[..., Any]:
    """The call as a function of arrays, the same object for the same static arguments."""

    def function(*leaves: Array) -> Any:
        return call(interpret, *static, jax.tree.unflatten(structure, leaves))

    return function


def _forward_call(interpret: Any, statistics: bool, arrays: ForwardArrays) -> ForwardResults:
    shared, queries, keys = arrays
    target_length = queries.features.shape[1]
    results = ForwardResults(
        jax.ShapeDtypeStruct((keys.vectors.shape[0], target_length), jnp.float32),
        jax.ShapeDtypeStruct((3 if statistics else 2, target_length), jnp.float32),
    )
    return _call(
        interpret,
        kernels.forward_kernel,
        "attention_forward",
        shared,
        queries,
        keys,
        results,
        own_parts=("features", "windows"),
        other_parts=("features", "vectors"),
    )


def _backward_call(
    interpret: Any, arrays: BackwardArrays
) -> tuple[BackwardResults, BackwardResults]:
    def like(array: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, jnp.float32)

    def run(own_keys: bool, shared: Shared, own: Side, other: Side, results: BackwardResults):
        parts = ("features", "vectors", "numbers", "windows")
        name = "keys" if own_keys else "queries"
        return _call(
            interpret,
            functools.partial(kernels.backward_kernel, own_keys),
            f"attention_gradient_of_{name}",
            shared,
            own,
            other,
            results,
            own_parts=parts,
            other_parts=parts,
        )

    of_queries, of_keys, queries, keys = arrays
    slopes = like(queries.features)
    query_results = BackwardResults(slopes, slopes, None)
    key_results = BackwardResults(like(keys.features), None, like(keys.vectors))
    return (
        run(False, of_queries, queries, keys, query_results),
        run(True, of_keys, keys, queries, key_results),
    )


def _call(
    interpret: Any,
    kernel: Callable[..., None],
    name: str,
    shared: Shared,
    own: Side,
    other: Side,
    results: Any,
    *,
    own_parts: tuple[str, ...],
    other_parts: tuple[str, ...],
) -> Any:
    """A program for each tile of the own side, of a kernel of references."""

    def tile(array: Any) -> Any:
        return plgpu.SMEM((array.shape[0], ROWS), array.dtype)

    def tile_of(side: Side, parts: tuple[str, ...]) -> Side:
        kept = (getattr(side, part) if part in parts else None for part in Side._fields)
        return Side(*(array if array is None else tile(array) for array in kept))

    # One barrier for each of `load_weights` and the two calls of `load`.
    barriers = tuple(
        plgpu.Barrier(num_arrivals=count)
        for count in (1, kernels.copies(own, own_parts), kernels.copies(other, other_parts))
    )
    scratch = (
        tile_of(own, own_parts),
        tile_of(other, other_parts),
        plgpu.SMEM(shared.weights.shape, jnp.float32),
        type(results)(*(leaf if leaf is None else tile(leaf) for leaf in results)),
        barriers,
    )
    trees = ((shared, own, other), results, scratch)
    flat, structures = zip(*(jax.tree.flatten(tree) for tree in trees), strict=True)
    ends = [len(flat[0]), len(flat[0]) + len(flat[1])]

    def body(*refs: Any) -> None:
        groups = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] :]
        inputs, results, scratch = map(jax.tree.unflatten, structures, groups)
        shared, own, other = inputs
        own_tile, other_tile, weights, result_tiles, barriers = scratch
        kernel(
            interpret is not None,
            shared,
            own,
            other,
            results,
            own_tile,
            other_tile,
            weights,
            result_tiles,
            barriers,
        )

    outputs = plgpu.kernel(
        body,
        out_type=flat[1],
        scratch_types=flat[2],
        grid=(own.features.shape[1] // ROWS,),
        grid_names=("tile",),
        kernel_name=name,
        interpret=interpret,
    )(*flat[0])
    return jax.tree.unflatten(structures[1], outputs)


# --- where the kernels run ---


def _gpu_interpret_params() -> Any:
    """The parameters under `force_gpu_interpret_mode`, on any device; None outside."""
    params = interpret_params()
    return params if type(params).__name__ == "InterpretGPUParams" else None


_REFUSAL = (
    "implementation 'mosaic_gpu': its kernels run on an NVIDIA GPU of the Hopper generation,"
    " not on {platforms}: use 'tiled'"
)
