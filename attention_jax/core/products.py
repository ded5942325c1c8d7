"""Matrix products with sums in at least float32; a tensor core can multiply 16-bit inputs.

float32 products are as accurate as `jax.default_matmul_precision` says. XLA:CPU always multiplies
float32 in full precision. A TPU rounds to bfloat16 and a GPU to TF32, unless the caller sets
"highest".
"""

from __future__ import annotations

from typing import Any

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


# --- products of few rows with many tokens ---

_FEW_ROWS = 8
_LARGEST_BLOCK = 192  # tokens
_LONGEST_UNPADDED = 2**13  # tokens, where no size of blocks divides them


def current_backend() -> str:
    """The platform of `jax.default_device` if it is set, otherwise `jax.default_backend()`.

    One of "cpu", "gpu" and "tpu". It does not see arrays that were put on another device, nor the
    platform of `jax.export`.

    >>> with jax.default_device(jax.devices("cpu")[0]):
    ...     current_backend()
    'cpu'
    """
    settings: Any = jax.config  # they are made while JAX is imported
    device = settings.jax_default_device
    if device is None:
        return jax.default_backend()
    platform: str = device if isinstance(device, str) else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def blocks_of(rows: int, tokens: int, few: int = 1) -> tuple[int, int] | None:
    """(count, size) of the blocks in which a product of at most `few` rows sums over tokens.

    XLA:CPU computes a product of one row as one running sum for each column. It is wrong by 1e-2 of
    its value for 2^20 equal terms; that of a few rows by 2e-5. Sums of near 128 terms each, and
    the sum of these, are right to 2e-6 and as fast. The size divides the tokens if it can. Else
    padding copies them, which takes as long as the product; short sequences are not worth it.

    Returns:
        None where a single product is right: with more rows, few tokens or lengths that are
        unknown, and on other backends.
    """
    if not (isinstance(rows, int) and isinstance(tokens, int)) or current_backend() != "cpu":
        return None
    if rows > few or tokens <= _LARGEST_BLOCK:
        return None
    sizes = [size for size in range(32, _LARGEST_BLOCK + 1) if tokens % size == 0]
    if not sizes and tokens <= _LONGEST_UNPADDED:
        return None
    size = min(sizes, key=lambda size: abs(size - 128), default=128)
    return -(-tokens // size), size


def cut_in_blocks(tokens: Any, blocks: tuple[int, int], axis: int = 0) -> Any:
    """[..., length, ...] -> [count, ..., size, ...]; the last token is repeated at the end."""

    def cut(leaf: Array) -> Array:
        missing = [(0, 0)] * leaf.ndim
        missing[axis] = 0, blocks[0] * blocks[1] - leaf.shape[axis]
        leaf = jnp.pad(leaf, missing, mode="edge") if missing[axis][1] else leaf
        shape = *leaf.shape[:axis], *blocks, *leaf.shape[axis + 1 :]
        return jnp.moveaxis(leaf.reshape(shape), axis, 0)

    return jax.tree.map(cut, tokens)


def for_each_block(tree: Any, blocks: tuple[int, int]) -> Any:
    """Repeats each leaf, [...] -> [count, ...]; a gradient is summed in at least float32."""

    def repeated(leaf: Array) -> Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        wide = leaf.astype(accumulator_dtype(leaf)) if is_float else leaf
        return jnp.broadcast_to(wide, (blocks[0], *leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(repeated, tree)


def weighted_sum(weights: Array, values: Array) -> Array:
    """weights @ values, ([t, s], [s, d]) -> [t, d], as `einsum`, with exact sums over tokens.

    >>> weighted_sum(jnp.full((1, 400), 1 / 400), jnp.full((400, 1), 0.5))
    Array([[0.5]], dtype=float32)
    """
    t, s = weights.shape
    if blocks := blocks_of(t, s, _FEW_ROWS):
        missing = blocks[0] * blocks[1] - s
        weights = jnp.pad(weights, ((0, 0), (0, missing))) if missing else weights
        factors = cut_in_blocks(weights, blocks, axis=1), cut_in_blocks(values, blocks)
        return jnp.sum(einsum("bts,bsd->btd", *factors), axis=0)
    if blocks := blocks_of(s, t):  # for the gradient of the values
        factors = cut_in_blocks(weights, blocks), for_each_block(values, blocks)
        products = einsum("bts,bsd->btd", *factors)
        return products.reshape(-1, products.shape[-1])[:t]
    # No size divides s. The kernel for several rows sums in larger blocks, right to 1e-5.
    if t == 1 and s > _LARGEST_BLOCK and current_backend() == "cpu":
        return einsum("ts,sd->td", jnp.concatenate([weights, weights]), values)[:1]
    return einsum("ts,sd->td", weights, values)


# --- products in other forms ---

_TALL = 16  # rows of a product from which it is computed as its transpose


def tall_product(left: Array, right: Array) -> Array:
    """right^T left, ([t, d], [t, s]) -> [s, d], fast where s is much larger than d.

    It is computed as (left^T right)^T. For [s, t] @ [t, d] XLA:CPU transposes the larger factor
    and takes three times as long; XLA:TPU estimates four times the cycles. Barriers keep XLA from
    rewriting the product in that form. With few rows nothing is gained, and the compiler of jaxlib
    0.10.2 ends the process: it cannot emit batches of such products if all sizes are small.
    """
    if right.shape[1] < _TALL:
        return weighted_sum(right.T, left)
    barrier = jax.lax.optimization_barrier
    return barrier(einsum("dt,ts->ds", barrier(left.T), right)).T


def matmul(left: Array, right: Array) -> Array:
    """left @ right, ([t, d], [d, a]) -> [t, a], multiplied in the wider dtype of the two."""
    dtype = accumulator_dtype(left, right)
    if left.dtype != right.dtype:
        left, right = left.astype(dtype), right.astype(dtype)
    return jnp.einsum("td,da->ta", left, right, preferred_element_type=dtype)
