"""Matrix products with sums in at least float32; a tensor core can multiply 16-bit inputs.

float32 products are as accurate as `jax.default_matmul_precision` says. XLA:CPU always multiplies
float32 in full precision. A TPU rounds to bfloat16 and a GPU to TF32, unless the caller sets
"highest".
"""

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


def is_one_row(rows: int, tokens: int) -> bool:
    """Whether a product sums over many tokens for one row, on a CPU.

    XLA:CPU computes it as one running sum for each column, which is wrong by 1e-2 of its value for
    2^20 equal terms. A product of two equal rows is wrong by 2e-5, and takes as long.
    """
    are_known = isinstance(rows, int) and isinstance(tokens, int)
    return are_known and rows == 1 and tokens > _LARGEST_BLOCK and current_backend() == "cpu"


def blocks_of(rows: int, tokens: int) -> tuple[int, int] | None:
    """(count, size) of the blocks in which a product of one row sums over tokens.

    Sums of near 128 terms each, and the sum of these, are right to 2e-6.

    Returns:
        None for other products, and where no size divides the tokens: padding would copy them.
    """
    sizes = range(32, _LARGEST_BLOCK + 1) if is_one_row(rows, tokens) else ()
    size = min((n for n in sizes if tokens % n == 0), key=lambda n: abs(n - 128), default=None)
    return None if size is None else (tokens // size, size)


def cut_in_blocks(tokens: Any, blocks: tuple[int, int], axis: int = 0) -> Any:
    """[..., length, ...] -> [count, ..., size, ...]."""

    def cut(leaf: Array) -> Array:
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

    >>> weighted_sum(jnp.full((1, 512), 1 / 512), jnp.full((512, 1), 0.5))
    Array([[0.5]], dtype=float32)
    """
    t, s = weights.shape
    if isinstance(t, int) and 1 < t <= _FEW_ROWS and (blocks := blocks_of(1, s)):
        return _few_sums_of_blocks(blocks, weights, values)
    if blocks := blocks_of(t, s):
        return _sums_of_blocks(blocks, weights, values)
    if is_one_row(t, s):  # no size divides s: blocks of most of it, and the rest
        most = s - s % 128
        first = weighted_sum(weights[:, :most], values[:most])
        return first + einsum("ts,sd->td", weights[:, most:], values[most:])
    if blocks := blocks_of(s, t):  # for the gradient of the values
        factors = cut_in_blocks(weights, blocks), for_each_block(values, blocks)
        return einsum("bts,bsd->btd", *factors).reshape(t, values.shape[1])
    return einsum("ts,sd->td", weights, values)


def _sums_of_blocks(blocks: tuple[int, int], weights: Array, values: Array) -> Array:
    factors = cut_in_blocks(weights, blocks, axis=1), cut_in_blocks(values, blocks)
    return jnp.sum(einsum("bts,bsd->btd", *factors), axis=0)


_few_sums_of_blocks = jax.custom_jvp(_sums_of_blocks, nondiff_argnums=(0,))


@_few_sums_of_blocks.defjvp
def _few_sums_of_blocks_jvp(blocks: Any, primals: Any, tangents: Any) -> Any:
    """Derivatives of several rows need no blocks: their products are right to 2e-5, and faster."""
    (weights, values), (dweights, dvalues) = primals, tangents
    dsums = einsum("ts,sd->td", dweights, values) + einsum("ts,sd->td", weights, dvalues)
    return _few_sums_of_blocks(blocks, *primals), dsums


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
