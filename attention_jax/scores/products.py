"""Matrix products for scores and their gradients: accurate, and fast on the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype

Array = jax.Array


def tall_product(left: Array, right: Array) -> Array:
    """right^T left, ([t, d], [t, s]) -> [s, d], fast where s is much larger than d.

    It is computed as (left^T right)^T. For [s, t] @ [t, d] XLA:CPU transposes the larger factor
    and takes three times as long. The barriers keep XLA from rewriting the first as the second.
    """
    left = jax.lax.optimization_barrier(left.T)
    return jax.lax.optimization_barrier(einsum("dt,ts->ds", left, right)).T


def matmul(left: Array, right: Array) -> Array:
    """left @ right, ([t, d], [d, a]) -> [t, a], with the accuracy of `einsum`."""
    return einsum("td,da->ta", left, right)


def einsum(formula: str, left: Array, right: Array) -> Array:
    """A product accumulated in at least float32; on a GPU or TPU, in true float32."""
    dtype = accumulator_dtype(left, right)
    return jnp.einsum(formula, left, right, precision="highest", preferred_element_type=dtype)
