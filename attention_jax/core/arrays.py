"""What counts as an array of floats, integers or booleans, and what is said of the rest."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Array = jax.Array
Tree = TypeVar("Tree")


def float_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array; ValueError, with the argument's name, unless it holds floats."""
    array = any_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating-point; got dtype {array.dtype}")
    return array


def integer_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array; ValueError, with the argument's name, unless it holds integers."""
    array = any_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers; got dtype {array.dtype}")
    return array


def bool_array(name: str, value: Any, meaning: str) -> jax.Array:
    """`value` as a JAX array; ValueError, with what True means, unless it holds booleans."""
    array = any_array(name, value)
    if array.dtype != jnp.bool_:
        raise ValueError(f"{name} must be boolean, True = {meaning}; got dtype {array.dtype}")
    return array


def any_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array; ValueError, with the argument's name, if it is none."""
    try:
        if isinstance(value, str):  # which JAX may take for the name of a dtype
            raise TypeError("text")
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array; got {type(value).__name__}") from error


def accumulator_dtype(*arrays: Array) -> jnp.dtype:
    """What sums over these floats are taken in: float64 if any of them is, else float32.

    Not `jnp.promote_types`: it refuses bfloat16 where a careful user has made promotion strict.
    """
    double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def cast_floats(tree: Tree, dtype: jnp.dtype) -> Tree:
    """The same pytree, its floating-point leaves in another dtype."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
