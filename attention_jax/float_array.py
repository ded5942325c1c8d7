"""What counts as a float array, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def float_array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array; ValueError, with the argument's name, unless it holds floats."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array; got {type(value).__name__}") from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating-point; got dtype {array.dtype}")
    return array
