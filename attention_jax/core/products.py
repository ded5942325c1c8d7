"""Matrix products with sums in at least float32; a tensor core can multiply 16-bit inputs.

float32 products are as accurate as `jax.default_matmul_precision` says. XLA:CPU always multiplies
float32 in full precision. A TPU rounds to bfloat16 and a GPU to TF32, unless the caller sets
"highest".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype

Array = jax.Array


def einsum(formula: str, left: Array, right: Array) -> Array:
    """A product of two arrays, summed in float32, or in float64 if one of them is float64.

    If one array is bfloat16 or float16, the other is rounded to the same dtype, so that a tensor
    core can multiply them. (bfloat16 and float16 together are multiplied in float32.)

    >>> weights, values = jnp.array([[0.25, 0.75]]), jnp.array([[4.0], [8.0]], jnp.bfloat16)
    >>> einsum("ts,sd->td", weights, values)
    Array([[7.]], dtype=float32)
    """
    sums = accumulator_dtype(left, right)
    narrow = {array.dtype for array in (left, right) if array.dtype.itemsize == 2}
    factors = narrow.pop() if len(narrow) == 1 and sums == jnp.float32 else sums
    # Other precisions have no effect on 16-bit factors, and Mosaic cannot lower them.
    precision = jax.lax.Precision.DEFAULT if factors.itemsize == 2 else None
    return jnp.einsum(
        formula,
        left.astype(factors),
        right.astype(factors),
        precision=precision,
        preferred_element_type=sums,
    )


_TALL = 16  # rows of a product from which it is computed as its transpose


def tall_product(left: Array, right: Array) -> Array:
    """right^T left, ([t, d], [t, s]) -> [s, d], fast where s is much larger than d.

    It is computed as (left^T right)^T. For [s, t] @ [t, d] XLA:CPU transposes the larger factor
    and takes three times as long; XLA:TPU estimates four times the cycles. Barriers keep XLA from
    rewriting the product in that form. With few rows nothing is gained, and the compiler of jaxlib
    0.10.2 ends the process: it cannot emit batches of such products if all sizes are small.
    """
    if right.shape[1] < _TALL:
        return einsum("ts,td->sd", right, left)
    barrier = jax.lax.optimization_barrier
    return barrier(einsum("dt,ts->ds", barrier(left.T), right)).T


def matmul(left: Array, right: Array) -> Array:
    """left @ right, ([t, d], [d, a]) -> [t, a], multiplied in the wider dtype of the two."""
    dtype = accumulator_dtype(left, right)
    if left.dtype != right.dtype:
        left, right = left.astype(dtype), right.astype(dtype)
    return jnp.einsum("td,da->ta", left, right, preferred_element_type=dtype)
