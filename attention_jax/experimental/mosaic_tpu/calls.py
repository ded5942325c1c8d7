"""The calls of the Pallas TPU kernels: grids, blocks, scratch memory, and checks."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention_jax.core.errors import one_line
from attention_jax.core.names import is_of_library
from attention_jax.experimental.devices import interpret_params, only_on, varying_type
from attention_jax.experimental.mosaic_tpu import kernels, operands
from attention_jax.experimental.mosaic_tpu.operands import LANES, Blocks, TileProgram
from attention_jax.kernels.preparation import refuse
from attention_jax.normalizers.softmax_rows import SoftmaxSums

Array = jax.Array

VMEM_OF_V5E = 128 * 2**20  # bytes of a core's vector memory, and of a v6e's
KERNELS_SHARE = 100 / 128  # of that memory, what a kernel may use
GRADIENTS_SHARE = 72 / 128  # what its gradients may; the tiles need the rest


def run_call(
    call: Callable[[TileProgram, Blocks], Any], program: TileProgram, blocks: Blocks
) -> Any:
    """`forward_call` or `backward_call`, if that can be lowered for a TPU."""
    if interpret_params() is None:
        leaves, structure = jax.tree.flatten(blocks)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        settings: Any = jax.config
        precision, x64 = settings.jax_default_matmul_precision, settings.jax_enable_x64
        parts = program.plan.options.score, program.plan.options.normalizer
        # A user's part may hold arrays, which a cache would keep.
        check = _check_lowering if all(map(is_of_library, parts)) else _check_lowering.__wrapped__
        check(call, program, structure, shapes, vector_memory(), precision, x64)
        leaves[0] = only_on("tpu", _REFUSAL, leaves[0])
        blocks = jax.tree.unflatten(structure, leaves)
    return call(program, blocks)


def forward_call(program: TileProgram, blocks: Blocks) -> Any:
    """(output [query_tiles, t, Dv], sums [query_tiles, 1, t])"""
    t, query_tiles = program.plan.tile[0], program.plan.query_tiles
    value_dim = blocks.operands.values.shape[-1]

    def sums(row: Any) -> SoftmaxSums:
        return SoftmaxSums(row, row, row if program.plan.options.return_statistics else None)

    output = jax.ShapeDtypeStruct((query_tiles, t, value_dim), program.plan.output_dtype)
    results = output, sums(jax.ShapeDtypeStruct((query_tiles, 1, t), jnp.float32))
    specs = jax.tree.map(operands.of_query, results)
    state = kernels.ForwardState(sums(_per_lane(t)), pltpu.VMEM((t, value_dim), jnp.float32))
    call = functools.partial(_pallas_call, kernels.forward_kernel, "attention_forward")
    return call(program, blocks, results, specs, state, ("parallel", "arbitrary"))


def backward_call(program: TileProgram, blocks: Blocks) -> Any:
    """The gradients of the operands in tiles."""
    results = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), blocks.operands
    )
    specs = operands.gradient_specs(results)

    def sum_of(leaf: Any, spec: Any) -> Any:
        # A sum in float32 needs no memory beside its result.
        shape = [size for size in spec.block_shape if size is not None]
        return None if leaf.dtype == jnp.float32 else pltpu.VMEM(shape, jnp.float32)

    state = kernels.BackwardState(
        terms=jax.tree.map(lambda _: _per_lane(program.plan.tile[0]), blocks.terms),
        sums=jax.tree.map(sum_of, results, specs),
    )
    call = functools.partial(_pallas_call, kernels.backward_kernel, "attention_backward")
    return call(program, blocks, results, specs, state, ("arbitrary", "arbitrary"))


def _per_lane(t: int) -> Any:
    return pltpu.VMEM((t, LANES), jnp.float32)


def _pallas_call(
    kernel: Callable[..., None],
    name: str,
    program: TileProgram,
    blocks: Blocks,
    results: Any,
    specs: Any,
    scratch: Any,
    semantics: tuple[Any, Any],
) -> Any:
    """A call over (tiles of queries, steps), of a kernel of pytrees of references.

    Args:
        kernel: a function of (program, blocks, results, scratch), references but for the program.
        name: of the kernel in compiled programs.
        program: what the kernel computes on a tile.
        blocks: what the kernel reads; the schedule is prefetched.
        results: the shapes of what it writes.
        specs: the `BlockSpec` of each result.
        scratch: memory that lives from step to step.
        semantics: whether the steps of each axis may run in parallel.
    """
    leaves, structure = jax.tree.leaves(blocks), jax.tree.structure((blocks, results, scratch))

    def flat_kernel(*refs: Any) -> None:
        kernel(program, *jax.tree.unflatten(structure, refs))

    # On one core, the interpreter of jax 0.10.2 fails if the grid has batch axes too.
    on_several_cores = getattr(interpret_params(), "num_cores_or_threads", 2) > 1
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(jax.tree.leaves(blocks.schedule)),
        grid=program.plan.tiles,
        in_specs=jax.tree.leaves(operands.specs(blocks)),
        out_specs=jax.tree.leaves(specs),
        scratch_shapes=jax.tree.leaves(scratch),
    )
    outputs = pl.pallas_call(
        flat_kernel,
        grid_spec=grid_spec,
        out_shape=[varying_type(shape, leaves) for shape in jax.tree.leaves(results)],
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics if on_several_cores else None,
            vmem_limit_bytes=int(KERNELS_SHARE * vector_memory()),
        ),
    )(*leaves)
    return jax.tree.unflatten(jax.tree.structure(results), outputs)


# --- what a kernel needs ---


def vector_memory() -> int:
    """Bytes of a core's vector memory: of the TPU that is there; without one, of a v5e."""
    if jax.devices()[0].platform != "tpu":
        return VMEM_OF_V5E
    return int(pltpu.get_tpu_info().vmem_capacity_bytes)


def check_memory(blocks: Blocks) -> None:
    """Raises NotImplementedError if the gradients of one example do not fit into VMEM."""
    needed = 0
    for leaf in jax.tree.leaves(blocks.operands[1:]):
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


_REFUSAL = (
    "implementation 'mosaic_tpu' runs on a TPU, not on {platforms}: use 'tiled', or"
    " jax.experimental.pallas.tpu.force_tpu_interpret_mode(True) to interpret its kernels"
)


@functools.lru_cache(maxsize=256)
def _check_lowering(
    call: Callable[..., Any],
    program: TileProgram,
    structure: Any,
    shapes: tuple[Any, ...],
    *surroundings: Any,  # what it depends on beside its arguments
) -> None:
    """Raises NotImplementedError if JAX cannot lower the kernel for a TPU; nothing is compiled."""

    def function(*leaves: Array) -> Any:
        return call(program, jax.tree.unflatten(structure, leaves))

    try:
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    except Exception as error:
        # The reason on one line, without the places in files that Pallas adds.
        reason = re.sub(r" at \S+:\d+", "", one_line(error))
        refuse("mosaic_tpu", f"cannot run {program.plan.options.score} in its kernels: {reason}")
