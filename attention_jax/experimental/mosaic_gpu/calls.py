"""The calls of the GPU kernels: programs, memory, and where they may run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention_jax.experimental.devices import interpret_params, only_on
from attention_jax.experimental.mosaic_gpu.kernels import (
    KernelInputs,
    ProgramRefs,
    SideArrays,
    copies,
)
from attention_jax.experimental.mosaic_gpu.registers import ROWS, Registers
from attention_jax.experimental.mosaic_gpu.tanh_quotients import FEATURES_PER_STEP

Array = jax.Array

OTHER_MEMORY = 8 * 2**10  # rows of numbers, barriers, and what Pallas keeps for itself


def shared_memory(features: int, value_dim: int) -> int:
    """The bytes of a program's memory that the larger of the backward kernels needs."""
    features += -features % FEATURES_PER_STEP
    rows = max(4 * features + 2 * value_dim, 3 * features + 3 * value_dim)
    return 4 * (ROWS * rows + features) + OTHER_MEMORY


def run_kernel(
    kernel: Callable[[Registers, ProgramRefs], None],
    name: str,
    shared: KernelInputs,
    own: SideArrays,
    other: SideArrays,
    results: Any,
) -> Any:
    """Runs a program for each tile of the own side.

    Args:
        kernel: see `kernels.py`.
        name: of the kernel in compiled programs.
        shared: what every program reads.
        own: the tokens of which a program has one tile.
        other: the tokens over whose tiles it loops.
        results: a pytree of the number of rows of each array [n, tokens] of results.
    """
    leaves = jax.tree.leaves((shared, own, other))
    interpret = interpret_params()
    columns = own.features.shape[1]
    shapes = jax.tree.map(lambda n: jax.ShapeDtypeStruct((n, columns), jnp.float32), results)
    scratch = (
        # A tile of each array [n, tokens].
        *jax.tree.map(
            lambda array: plgpu.SMEM((array.shape[0], ROWS), array.dtype), (own, other, shapes)
        ),
        plgpu.SMEM(shared.weights.shape, jnp.float32),
        # One barrier for each of the weights, the own tile and the other tile.
        *(plgpu.Barrier(num_arrivals=count) for count in (1, copies(own), copies(other))),
    )
    structure = jax.tree.structure(((shared, own, other), shapes, scratch))

    def body(*refs: Any) -> None:
        inputs, results, memory = jax.tree.unflatten(structure, refs)
        kernel(Registers(interpret is not None), ProgramRefs(*(*inputs, results, *memory)))

    def call(*leaves: Array) -> Any:
        outputs = plgpu.kernel(
            body,
            out_type=jax.tree.leaves(shapes),
            scratch_types=jax.tree.leaves(scratch),
            grid=(columns // ROWS,),
            grid_names=("tile",),
            kernel_name=name,
            interpret=interpret,
        )(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    if interpret is not None:
        # JAX's interpreter has ordered effects, which derivatives and checkpoints refuse: in a
        # callback nothing sees them.
        def on_host(*args: Any) -> Any:
            return jax.tree.map(np.asarray, jax.jit(call)(*map(np.asarray, args)))

        return jax.pure_callback(on_host, shapes, *leaves, vmap_method="sequential")
    leaves[0] = only_on("cuda", _REFUSAL, leaves[0])
    return call(*leaves)


_REFUSAL = (
    "implementation 'mosaic_gpu': its kernels run on an NVIDIA GPU of the Hopper generation,"
    " not on {platforms}: use 'tiled'"
)
