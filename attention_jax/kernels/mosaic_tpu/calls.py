"""The calls of the Pallas TPU kernels: grids, blocks, scratch memory, and checks."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention_jax.core.meshes import varying_type
from attention_jax.core.programs import one_line
from attention_jax.kernels.devices import interpret_params, only_on
from attention_jax.kernels.mosaic_tpu import kernels, operands
from attention_jax.kernels.mosaic_tpu.operands import LANES, Blocks, Program
from attention_jax.kernels.rows import RowTerms, Sums
from attention_jax.kernels.tokens import refuse

Array = jax.Array

VMEM_OF_V5E = 128 * 2**20  # bytes of a core's vector memory, and of a v6e's
KERNELS_SHARE = 100 / 128  # of that memory, what a kernel may use
GRADIENTS_SHARE = 72 / 128  # what its gradients may; the tiles need the rest


def run_forward(program: Program, arrays: tuple) -> tuple[Array, Sums]:
    """(output [query_tiles, t, Dv], sums [query_tiles, 1, t]) of the arrays (schedule, blocks)."""
    return _run(_forward_call, program, arrays)


def run_backward(program: Program, arrays: tuple) -> kernels.Gradients:
    """The gradients of the blocks, of the arrays (schedule, blocks, terms, doutput)."""
    _, blocks, *_ = arrays
    _check_memory((blocks.keys, blocks.values, blocks.params))
    return _run(_backward_call, program, arrays)


def _run(call: Callable[..., Any], program: Program, arrays: tuple) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    if interpret_params() is None:
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        _check_lowering(call, program, structure, shapes, vector_memory(), lowering_settings())
        leaves[0] = only_on("tpu", _REFUSAL, leaves[0])
    return call(program, *jax.tree.unflatten(structure, leaves))


def _forward_call(program: Program, schedule: Any, blocks: Blocks) -> tuple[Array, Sums]:
    t, query_tiles = program.call.tile[0], program.call.tiles[0]
    value_dim = blocks.values.shape[-1]
    row = jax.ShapeDtypeStruct((query_tiles, 1, t), jnp.float32)
    excess = row if program.call.options.return_statistics else None
    output = jax.ShapeDtypeStruct((query_tiles, t, value_dim), program.call.output_dtype)
    results = output, Sums(row, row, excess)
    per_lane = pltpu.VMEM((t, LANES), jnp.float32)
    state = kernels.ForwardState(
        largest=per_lane,
        total=per_lane,
        weighted=pltpu.VMEM((t, value_dim), jnp.float32),
        excess=None if excess is None else per_lane,
    )

    def kernel(schedule, blocks, results, state):
        output, sums = results
        kernels.forward_kernel(program, schedule, blocks, output, sums, state)

    return _pallas_call(
        kernel,
        "attention_forward",
        program,
        schedule,
        (blocks, operands.specs(blocks)),
        (results, jax.tree.map(operands.of_query, results)),
        state,
        ("parallel", "arbitrary"),
    )


def _backward_call(
    program: Program, schedule: Any, blocks: Blocks, terms: RowTerms, doutput: Array
) -> kernels.Gradients:
    results = kernels.Gradients(
        *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), blocks[:4])
    )
    queries, *of_example = results
    specs = kernels.Gradients(
        jax.tree.map(operands.of_query, queries), *jax.tree.map(operands.of_all, of_example)
    )

    def sum_of(leaf: Any, spec: Any) -> Any:
        # A sum in float32 needs no memory beside its result.
        shape = [size for size in spec.block_shape if size is not None]
        return None if leaf.dtype == jnp.float32 else pltpu.VMEM(shape, jnp.float32)

    per_lane = pltpu.VMEM((program.call.tile[0], LANES), jnp.float32)
    state = kernels.BackwardState(
        doutput=pltpu.VMEM(doutput.shape[1:], blocks.values.dtype),
        terms=jax.tree.map(lambda _: per_lane, terms._replace(scale=None)),
        sums=jax.tree.map(sum_of, results, specs),
    )

    def kernel(schedule, inputs, gradients, state):
        sums = jax.tree.map(
            lambda total, result: result if total is None else total,
            state.sums,
            gradients,
            is_leaf=lambda leaf: leaf is None,
        )
        state = state._replace(sums=sums)
        blocks, terms, doutput = inputs
        kernels.backward_kernel(program, schedule, blocks, terms, doutput, gradients, state)

    return _pallas_call(
        kernel,
        "attention_backward",
        program,
        schedule,
        (
            (blocks, terms, doutput),
            (operands.specs(blocks), *jax.tree.map(operands.of_query, (terms, doutput))),
        ),
        (results, specs),
        state,
        ("arbitrary", "arbitrary"),
    )


def _check_memory(results: Any) -> None:
    """Raises NotImplementedError if the gradients of one example do not fit into VMEM."""
    needed = 0
    for leaf in jax.tree.leaves(results):
        *rest, lanes = leaf.shape
        size = math.prod(rest) * -(-lanes // LANES) * LANES
        # Two buffers of the result, and the sum in float32 if the result is narrower.
        needed += size * (2 * leaf.dtype.itemsize + 4 * (leaf.dtype.itemsize < 4))
    most = int(GRADIENTS_SHARE * vector_memory())
    if needed > most:
        refuse(
            "mosaic_tpu",
            f"keeps the gradients of all keys in the chip's memory: {needed / 2**20:.0f} MiB, more"
            f" than {most / 2**20:.0f}",
        )


def _pallas_call(
    kernel: Callable[..., None],
    name: str,
    program: Program,
    schedule: Any,
    inputs: tuple[Any, Any],
    results: tuple[Any, Any],
    scratch: Any,
    semantics: tuple[Any, Any],
) -> Any:
    """A call over (tiles of queries, steps), of a kernel of pytrees of references.

    Args:
        kernel: a function of (schedule, inputs, results, scratch), all references.
        name: of the kernel in compiled programs.
        program: says how many tiles there are.
        schedule: prefetched numbers, or None.
        inputs: (arrays, the `BlockSpec` of each).
        results: (shapes, the `BlockSpec` of each).
        scratch: memory that lives from step to step.
        semantics: whether the steps of each axis may run in parallel.
    """
    structure = jax.tree.structure((schedule, inputs[0], results[0], scratch))
    prefetched, arrays, shapes = map(jax.tree.leaves, (schedule, inputs[0], results[0]))

    def flat_kernel(*refs: Any) -> None:
        kernel(*jax.tree.unflatten(structure, refs))

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=program.call.tiles,
        in_specs=jax.tree.leaves(inputs[1]),
        out_specs=jax.tree.leaves(results[1]),
        scratch_shapes=jax.tree.leaves(scratch),
    )
    outputs = pl.pallas_call(
        flat_kernel,
        grid_spec=grid_spec,
        out_shape=[varying_type(shape, prefetched, arrays) for shape in shapes],
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics if _is_parallel(interpret_params()) else None,
            vmem_limit_bytes=int(KERNELS_SHARE * vector_memory()),
        ),
    )(*prefetched, *arrays)
    return jax.tree.unflatten(jax.tree.structure(results[0]), outputs)


def _is_parallel(interpret: Any) -> bool:
    """Whether kernels run on several cores: on a TPU, or where the interpreter has several.

    With one core, the interpreter of jax 0.10.2 fails if the grid has batch axes too.
    """
    return interpret is None or getattr(interpret, "num_cores_or_threads", 1) > 1


# --- what a kernel needs ---


def vector_memory() -> int:
    """Bytes of a core's vector memory: of the TPU that is there; without one, of a v5e."""
    if jax.devices()[0].platform != "tpu":
        return VMEM_OF_V5E
    return int(pltpu.get_tpu_info().vmem_capacity_bytes)


_REFUSAL = (
    "implementation 'mosaic_tpu' runs on a TPU, not on {platforms}: use 'tiled', or"
    " jax.experimental.pallas.tpu.force_tpu_interpret_mode(True) to interpret its kernels"
)


def lowering_settings() -> tuple[Any, ...]:
    """The settings of JAX on which it depends whether a kernel can be lowered."""
    settings: Any = jax.config
    return settings.jax_default_matmul_precision, settings.jax_enable_x64


@functools.lru_cache(maxsize=256)
def _check_lowering(
    call: Callable[..., Any],
    program: Program,
    structure: Any,
    shapes: tuple[Any, ...],
    *surroundings: Any,
) -> None:
    """Raises NotImplementedError if JAX cannot lower the kernel for a TPU; nothing is compiled."""
    del surroundings  # what it depends on beside its arguments

    def function(*leaves: Array) -> Any:
        return call(program, *jax.tree.unflatten(structure, leaves))

    try:
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    except Exception as error:
        # The reason on one line, without the places in files that Pallas adds.
        reason = re.sub(r" at \S+:\d+", "", one_line(error))
        refuse("mosaic_tpu", f"cannot run {program.call.options.score} in its kernels: {reason}")
