"""What counts as an array of floats, integers or booleans, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


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
