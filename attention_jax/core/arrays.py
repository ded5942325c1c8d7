"""Conversion of arguments to arrays, casts of floats, and numbers of axes."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.jet import JetTracer

from attention_jax.core.checks import check_entries

NO_TAYLOR_MODE = "jax.experimental.jet cannot differentiate attention: nest jax.jvp instead"

Array = jax.Array
Tree = TypeVar("Tree")


def float_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array; raises ValueError, with the argument's name, unless it is float."""
    return _array_of(jnp.floating, "floating-point", name, value)


def integer_array(name: str, value: Any) -> jax.Array:
    """`value` as int32 or int64; raises ValueError, with the argument's name, unless integer.

    Sums and comparisons with positions would overflow in a narrower type. An integer of an
    array that int32 cannot hold is refused where the host has it: JAX would cut its upper bits.
    """
    array = _array_of(jnp.integer, "integers", name, value)
    if array.dtype == jnp.int64:
        return array
    given = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else array
    if given.dtype in (np.int64, np.uint32, np.uint64):
        check_entries(name, given, -(2**31), 2**31 - 1)
    return array.astype(jnp.int32)


def bool_array(name: str, value: Any, meaning: str) -> jax.Array:
    """`value` as a JAX array; raises ValueError, with the meaning of True, unless it is boolean."""
    return _array_of(jnp.bool_, f"boolean, True = {meaning}", name, value)


def _array_of(kind: Any, expected: str, name: str, value: Any) -> jax.Array:
    array = any_array(name, value)
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} must be {expected}; got dtype {array.dtype}")
    return array


def any_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array; raises ValueError, with the argument's name, if it is none."""
    if isinstance(value, JetTracer):  # JAX loses the rule of a `custom_jvp` under it
        raise NotImplementedError(NO_TAYLOR_MODE)
    try:
        if isinstance(value, str):  # JAX may read a string as the name of a dtype
            raise TypeError("text")
        return jnp.asarray(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):  # as of a device without memory
            raise
        got = type(value).__name__
        if hasattr(value, "detach"):
            got += ", which NumPy cannot read: give tensor.detach().cpu().float()"
        if callable(value) and hasattr(value, "__name__"):  # as in mask=causal_mask
            got += f" {value.__name__}, which was not called"
        raise ValueError(f"{name} must be an array; got {got}") from error


def accumulator_dtype(*arrays: Array) -> jnp.dtype:
    """The dtype for sums over these floats: float64 if any of them is float64, else float32.

    `jnp.promote_types` would refuse bfloat16 under strict promotion.
    """
    any_double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if any_double else jnp.float32)


def cast_floats(tree: Tree, dtype: jnp.dtype) -> Tree:
    """The pytree with its floating-point leaves cast to `dtype`."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `full` without enlarging `full`."""
    aligned = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(size in (1, to) for size, to in aligned)


# The functions below make ranks equal by hand, because users may forbid implicit rank promotion.


def pad_rank(array: Array, ndim: int) -> Array:
    """`array` with `ndim` axes; the added axes are in front and have size 1."""
    if array.ndim >= ndim:  # outside of `jit`, even a reshape to the same shape takes time
        return array
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def same_rank(left: Array, right: Array) -> tuple[Array, Array]:
    """Both arrays, padded to the larger number of axes."""
    ndim = max(left.ndim, right.ndim)
    return pad_rank(left, ndim), pad_rank(right, ndim)
