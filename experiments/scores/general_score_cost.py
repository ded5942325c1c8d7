"""Multiplications of the general score: by formula, and counted in the programs JAX traces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import SCORES
from experiments.experiment import JSON

Array = jax.Array


def multiplications(target_length: int, source_length: int, dim: int) -> JSON:
    """Counts the multiplications of the general score, computed in three ways."""
    query, key = jnp.zeros((target_length, dim)), jnp.zeros((source_length, dim))
    kernel = jnp.zeros((dim, dim))
    pairs, general, dot = target_length * source_length, SCORES["general"], SCORES["dot"]

    def a_pair_at_a_time(query: Array, key: Array, kernel: Array) -> Array:
        s = jnp.repeat(query, source_length, axis=0)
        h = jnp.tile(key, (target_length, 1))
        return jax.vmap(lambda s, h: s @ (kernel @ h))(s, h)

    def keys_once(query: Array, key: Array, kernel: Array) -> Array:
        return dot({}, query, key @ kernel.T)

    def queries_once(query: Array, key: Array, kernel: Array) -> Array:
        return general({"kernel": kernel}, query, key)

    count = functools.partial(count_multiplications, arguments=(query, key, kernel))
    return {
        "source_length": source_length,
        "pairs": {"counted": count(a_pair_at_a_time), "formula": pairs * (dim**2 + dim)},
        "keys": {"counted": count(keys_once), "formula": source_length * dim**2 + pairs * dim},
        "queries": {
            "counted": count(queries_once),
            "formula": target_length * dim**2 + pairs * dim,
        },
    }


def count_multiplications(function: Callable[..., Array], arguments: tuple[Array, ...]) -> int:
    """Counts the multiplications in the matrix products of a traced program without loops."""
    return _in_products(jax.make_jaxpr(function)(*arguments).jaxpr)


def _in_products(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        for parameter in equation.params.values():
            if hasattr(parameter, "jaxpr"):  # a function that the program calls
                total += _in_products(parameter.jaxpr)
    return total
