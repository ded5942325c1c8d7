"""The derivative rule of the Pallas kernels, for TPUs and for GPUs.

Reverse mode is a kernel too. All other derivatives are those of `plain_tiles`, in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import cast_floats
from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.implementations import plain_tiles
from attention_jax.implementations.tiled import Residuals
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.normalizers import AttentionStatistics, FinalRows

Array = jax.Array
Results = tuple[Array, AttentionStatistics | None]


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """The static part of a call."""

    plan: Plan
    output_dtype: Any


def attention_by_kernels(
    forward: Callable[[KernelPlan, Arrays, Constants], FinalRows],
    backward: Callable[[KernelPlan, Residuals, Results], Arrays],
) -> Callable[[KernelPlan, Arrays, Constants], Results]:
    """Returns attention on tiles by two kernels.

    Args:
        forward: (plan, arrays, constants) -> the results of all rows, in tiles.
        backward: (plan, residuals, cotangents of output and statistics) -> those of the arrays.

    Returns:
        (plan, arrays, constants) -> output [query_tiles, t, Dv], and statistics [query_tiles, t]
        if they are requested.
    """

    def twin(plan: KernelPlan, arrays: Arrays, constants: Constants) -> Results:
        wide = cast_floats(arrays, jnp.dtype(jnp.float32))
        output, statistics = plain_tiles.attend_tiles(plan.plan, wide, constants)
        return output.astype(plan.output_dtype), statistics

    @functools.partial(custom_vjp, nondiff_argnums=(0,), twin=twin)
    def attend_tiles(plan: KernelPlan, arrays: Arrays, constants: Constants) -> Results:
        rows = forward(plan, arrays, constants)
        return rows.output, rows.statistics

    def attend_fwd(plan, arrays, constants):
        rows = forward(plan, arrays, constants)
        return (rows.output, rows.statistics), Residuals(arrays, constants, rows)

    def attend_bwd(plan, residuals, cotangents):
        return backward(plan, residuals, cotangents), None

    attend_tiles.defvjp(attend_fwd, attend_bwd)
    return attend_tiles
