"""Contestants of the attention benchmark that run in JAX: this library's attention, and a helper.

Every contestant computes the same output from the same inputs, including the score's projections,
and the same derivatives. Arrays are converted to a contestant's own layout before timing starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import attention
from benchmarks.measure import Contestant, compiled
from benchmarks.works import FORWARD, GRAD, JVP, Tree, Work

Array = jax.Array
Attend = Callable[[Tree], Array]
TOKENS = ("query", "key", "value")


# --- derivatives: functions of inputs, a cotangent of the output, and a tangent of the inputs ---


def _grad(attend: Attend, inputs: Tree, cotangent: Array, tangent: Tree) -> Any:
    output, pull_back = jax.vjp(attend, inputs)
    return output, pull_back(cotangent)[0]


def _gradient(attend: Attend, cotangent: Array) -> Callable[[Tree], Tree]:
    return jax.grad(lambda inputs: jnp.vdot(attend(inputs), cotangent))


def _jvp_of_grad(attend: Attend, inputs: Tree, cotangent: Array, tangent: Tree) -> Any:
    return jax.jvp(_gradient(attend, cotangent), (inputs,), (tangent,))


def _grad_of_grad(attend: Attend, inputs: Tree, cotangent: Array, tangent: Tree) -> Any:
    def slope(inputs: Tree) -> Array:
        products = jax.tree.map(jnp.vdot, _gradient(attend, cotangent)(inputs), tangent)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    return jax.grad(slope)(inputs)


DERIVATIVES: dict[str, Callable[[Attend, Tree, Array, Tree], Any]] = {
    FORWARD: lambda attend, inputs, cotangent, tangent: attend(inputs),
    GRAD: _grad,
    JVP: lambda attend, inputs, cotangent, tangent: jax.jvp(attend, (inputs,), (tangent,)),
    "jvp of grad": _jvp_of_grad,
    "grad of grad": _grad_of_grad,
}


def program(work: Work, attend: Attend) -> Callable[[Tree, Array, Tree], Any]:
    """The work's derivative of a function of `work.arrays()`'s inputs."""
    derivative = DERIVATIVES[work.direction]
    return lambda inputs, cotangent, tangent: derivative(attend, inputs, cotangent, tangent)


# --- contestants ---


def ours(work: Work) -> Contestant:
    """`attention_jax.attention`; a LookupError, as from every peer, says why it is absent."""
    try:
        return jax_contestant(work, our_attention(work))
    except NotImplementedError as error:
        raise LookupError(str(error)) from error


def our_attention(work: Work) -> Attend:
    """`attention` with the work's options, as a function of inputs like `work.arrays()`."""

    def attend(inputs: Tree) -> Array:
        return attention(
            **inputs,
            score=work.score_object(),
            mask=work.mask_object(),
            normalizer=work.normalizer,
            implementation=work.implementation,
        )

    return attend


def jax_contestant(
    work: Work, attend: Attend, layout: str = "BNTD", inputs: Tree | None = None, **about: Any
) -> Contestant:
    """A compiled function of the work's inputs, or of other `inputs`."""
    work_inputs, cotangent = work.arrays()
    inputs = work_inputs if inputs is None else inputs
    if layout == "BTND":
        inputs |= {name: inputs[name].swapaxes(1, 2) for name in TOKENS}
        cotangent = cotangent.swapaxes(1, 2)
    arrays = inputs, cotangent, inputs
    arguments = jax.tree.map(lambda leaf: jnp.asarray(leaf, work.dtype), arrays)
    return compiled(program(work, attend), *arguments, layout=layout, **about)()


def projected(work: Work, inputs: Any) -> tuple[Any, float]:
    """(query, scale) with which the score is scale times a dot product; for any library's arrays.

    Raises:
        LookupError: the score is not a dot product.
    """
    if work.score == "general":
        return inputs["query"] @ inputs["params"]["kernel"], 1.0
    if work.score not in ("dot", "scaled"):
        raise LookupError(f"it has no score {work.score}")
    return inputs["query"], 1.0 if work.score == "dot" else 1 / math.sqrt(work.dim)
