"""The calls of the Pallas TPU kernels: grids, blocks, scratch memory, and checks."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention_jax.core.backend import interpret_params
from attention_jax.core.one_line import one_line
from attention_jax.core.only_on import only_on
from attention_jax.core.varying import varying_type
from attention_jax.implementations.tiling import Plan
from attention_jax.kernels.mosaic_tpu import kernels
from attention_jax.kernels.mosaic_tpu import operands as operand_blocks
from attention_jax.kernels.mosaic_tpu.operands import Operands, TilePrograms
from attention_jax.kernels.mosaic_tpu.position_programs import SideValues

Array = jax.Array

VMEM_OF_V5E = 128 * 2**20  # bytes of a core's vector memory, and of a v6e's
KERNELS_SHARE = 100 / 128  # of that memory, what a kernel may use
GRADIENTS_SHARE = 72 / 128  # what its gradients may; the tiles need the rest


def run_forward(programs: TilePrograms, output_dtype: Any, arrays: tuple) -> tuple:
    """(output [query_tiles, t, Dv], and largest, total and excess [query_tiles, 1, t])."""
    return _run(_forward_call, programs, arrays, output_dtype)


def run_backward(programs: TilePrograms, arrays: tuple) -> kernels.Gradients:
    """The gradients of the operands, given the arrays (schedule, operands, rows, doutput)."""
    return _run(_backward_call, programs, arrays)


def _run(call: Callable[..., Any], programs: TilePrograms, arrays: tuple, *static: Any) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    interpret = interpret_params()
    surroundings = interpret, vector_memory()
    function = _function_of_leaves(call, programs, structure, static, surroundings)
    if interpret is not None:
        return function(*leaves)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    _check_lowering(function, programs, shapes, lowering_settings())
    leaves[0] = only_on("tpu", _REFUSAL, leaves[0])
    return function(*leaves)


@functools.lru_cache(maxsize=256)
def _function_of_leaves(
    call: Callable[..., Any],
    programs: TilePrograms,
    structure: Any,
    static: tuple,
    surroundings: tuple,
) -> Callable[..., Any]:
    """The call as a function of arrays, the same object for the same static arguments."""
    del surroundings  # whether kernels are interpreted, and the chip's memory: the program differs

    def function(*leaves: Array) -> Any:
        return call(programs, *static, *jax.tree.unflatten(structure, leaves))

    return function


def _forward_call(programs: TilePrograms, output_dtype: Any, schedule: Any, operands: Operands):
    plan = programs.plan
    t, s, value_dim = plan.tile.query, plan.tile.key, operands.values.shape[-1]
    row = jax.ShapeDtypeStruct((plan.query_tiles, 1, t), jnp.float32)
    output = jax.ShapeDtypeStruct((plan.query_tiles, t, value_dim), output_dtype)
    excess = row if plan.options.return_statistics else None
    results = (output, row, row, excess)
    per_lane = pltpu.VMEM((t, _lanes(s)), jnp.float32)
    scratch = kernels.ForwardState(
        largest=per_lane,
        total=per_lane,
        weighted=pltpu.VMEM((t, value_dim), jnp.float32),
        excess=None if excess is None else per_lane,
    )

    def kernel(schedule, operands, results, state):
        output, largest, total, excess = results
        kernels.forward_kernel(programs, schedule, operands, output, largest, total, excess, state)

    return _pallas_call(
        kernel,
        name="attention_forward",
        plan=plan,
        schedule=schedule,
        inputs=(operands, operand_blocks.specs(plan, operands)),
        results=(results, jax.tree.map(operand_blocks.of_query, results)),
        scratch=scratch,
        semantics=("parallel", "arbitrary"),
    )


def _backward_call(
    programs: TilePrograms,
    schedule: Any,
    operands: Operands,
    rows: kernels.Rows,
    doutput: Array,
):
    plan = programs.plan
    t, s = plan.tile.query, plan.tile.key

    def like(leaf: Array) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if floating else jnp.float32)

    results = kernels.Gradients(
        *(jax.tree.map(like, getattr(operands, name)) for name in kernels.Gradients._fields)
    )
    _check_memory(programs, (results.keys, results.values, results.params))
    whole, of_query = (
        functools.partial(jax.tree.map, of)
        for of in (operand_blocks.of_all, operand_blocks.of_query)
    )
    blocks = kernels.Gradients(
        queries=of_query(results.queries),
        keys=whole(results.keys),
        values=whole(results.values),
        params=whole(results.params),
        bias=SideValues(
            of_query(results.bias.query), whole(results.bias.key), whole(results.bias.shared)
        ),
        bias_tables=[
            operand_blocks.block(table, 2, functools.partial(_raw_tile, plan))
            for table in results.bias_tables
        ],
    )
    # A sum in float32 needs no memory beside its result.
    sums = jax.tree.map(
        lambda leaf, block: (
            None
            if leaf.dtype == jnp.float32
            else pltpu.VMEM([n for n in block.block_shape if n is not None], jnp.float32)
        ),
        results._replace(bias_tables=[]),
        blocks._replace(bias_tables=[]),
    )
    per_lane = pltpu.VMEM((t, _lanes(s)), jnp.float32)
    state = kernels.BackwardState(
        doutput=pltpu.VMEM(doutput.shape[1:], operands.values.dtype),
        reference=per_lane,
        offset=per_lane,
        dentropy=None if rows.dentropy is None else per_lane,
        sums=sums,
    )

    def kernel(schedule, inputs, gradients, state):
        sums = jax.tree.map(
            lambda total, result: result if total is None else total,
            state.sums,
            gradients._replace(bias_tables=[]),
            is_leaf=lambda leaf: leaf is None,
        )
        operands, rows, doutput = inputs
        state = state._replace(sums=sums)
        kernels.backward_kernel(programs, schedule, operands, rows, doutput, gradients, state)

    specs = (operand_blocks.specs(plan, operands), *of_query((rows, doutput)))
    return _pallas_call(
        kernel,
        name="attention_backward",
        plan=plan,
        schedule=schedule,
        inputs=((operands, rows, doutput), specs),
        results=(results, blocks),
        scratch=state,
        semantics=("arbitrary", "arbitrary"),
    )


def _check_memory(programs: TilePrograms, results: Any) -> None:
    """Raises NotImplementedError if the gradients of one example do not fit into VMEM."""
    needed = 0
    for leaf in jax.tree.leaves(results):
        *rest, lanes = leaf.shape
        size = math.prod(rest) * -(-lanes // kernels.LANES) * kernels.LANES
        # Two buffers of the result, and the sum in float32 if the result is narrower.
        needed += size * (2 * leaf.dtype.itemsize + 4 * (leaf.dtype.itemsize < 4))
    most = int(GRADIENTS_SHARE * vector_memory())
    if needed > most:
        raise NotImplementedError(
            f"implementation 'mosaic_tpu': the gradients of {programs.plan.padded_lengths[1]} keys"
            f" take {needed / 2**20:.0f} MiB of the chip's memory, more than"
            f" {most / 2**20:.0f}: use 'tiled'"
        )


def _pallas_call(
    kernel: Callable[..., None],
    *,
    name: str,
    plan: Plan,
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
        plan: the tiles.
        schedule: prefetched numbers, or None.
        inputs: (arrays, the `BlockSpec` of each).
        results: (shapes, the `BlockSpec` of each).
        scratch: memory that lives from step to step.
        semantics: whether the steps of each axis may run in parallel.
    """
    trees = (schedule, inputs[0], results[0], scratch)
    flat, structures = zip(*map(jax.tree.flatten, trees), strict=True)
    counts = np.cumsum([len(leaves) for leaves in flat])

    def flat_kernel(*refs: Any) -> None:
        groups = (refs[end - len(leaves) : end] for end, leaves in zip(counts, flat, strict=True))
        kernel(*map(jax.tree.unflatten, structures, groups))

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(flat[0]),
        grid=plan.grid.tiles,
        in_specs=jax.tree.leaves(inputs[1]),
        out_specs=jax.tree.leaves(results[1]),
        scratch_shapes=flat[3],
    )
    outputs = pl.pallas_call(
        flat_kernel,
        grid_spec=grid_spec,
        out_shape=[varying_type(result, flat[:2]) for result in flat[2]],
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics if _is_parallel(interpret_params()) else None,
            vmem_limit_bytes=int(KERNELS_SHARE * vector_memory()),
        ),
    )(*flat[0], *flat[1])
    return jax.tree.unflatten(structures[2], outputs)


def _is_parallel(interpret: Any) -> bool:
    """Whether kernels run on several cores: on a TPU, or where the interpreter has several.

    With one core, the interpreter of jax 0.10.2 fails if the grid has batch axes too.
    """
    return interpret is None or getattr(interpret, "num_cores_or_threads", 1) > 1


def _lanes(size: int) -> int:
    """The lanes that hold a number of each query, for tiles of `size` keys."""
    return kernels.LANES if size % kernels.LANES == 0 else 1


def _raw_tile(plan: Plan, i: Array, n: Array, schedule: Sequence[Array]) -> tuple[Array, Array]:
    return (i, schedule[0][i * plan.key_tiles + n]) if schedule else (i, n)


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
    function: Callable[..., Any],
    programs: TilePrograms,
    shapes: tuple[Any, ...],
    settings: tuple[Any, ...],
) -> None:
    """Raises NotImplementedError if JAX cannot lower the kernel for a TPU; nothing is compiled."""
    del settings  # those of this moment
    try:
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    except Exception as error:
        given = {"mask": programs.mask is not None, "bias": programs.has_bias}
        parts = " and ".join(name for name, is_given in given.items() if is_given)
        raise NotImplementedError(
            f"implementation 'mosaic_tpu' cannot run {programs.plan.options.score}"
            f"{parts and f' with this {parts}'} in its kernels: {_reason(error)}: use 'tiled'"
        ) from error


def _reason(error: Exception) -> str:
    """The reason on one line, without the places in files that Pallas adds."""
    return re.sub(r" at \S+:\d+", "", one_line(error))
