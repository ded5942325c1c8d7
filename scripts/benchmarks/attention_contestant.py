"""A contestant of the attention benchmark: what each one provides, and this library's own.

Every contestant computes the same output from the same inputs, including the score's projections,
and the same gradients. Arrays are converted to a contestant's own layout before timing starts.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax import attention
from attention_jax.implementations import Inputs
from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.kernels.choice import chosen_implementation
from benchmarks.attention_works import Tree, Work
from benchmarks.measure import INSTALL, JSON, compile_cold, free_bytes

Array = jax.Array
_FREE_SHARE = 0.8  # of free memory that a contestant may take


class Contestant(NamedTuple):
    """A prepared computation.

    Attributes:
        call: computes once; returns when the output, or (output, gradients by name), is ready.
        about: further entries of its row; "layout" is the layout of its arrays.
        most_repeats: fewer repeats for a slow contestant; None for as many as the others.
    """

    call: Callable[[], Any]
    about: JSON
    most_repeats: int | None = None


def forward_backward(attend: Callable[[Tree], Array]) -> Callable[[Tree, Array], Any]:
    """(inputs, cotangent of the output) -> (output, gradients of all inputs)."""

    def both(inputs: Tree, cotangent: Array) -> tuple[Array, Tree]:
        output, pull_back = jax.vjp(attend, inputs)
        return output, pull_back(cotangent)[0]

    return both


def pushed_forward(attend: Callable[[Tree], Array]) -> Callable[[Tree, Tree], Any]:
    """(inputs, tangents of all inputs) -> (output, its tangent)."""
    return lambda inputs, tangents: jax.jvp(attend, (inputs,), (tangents,))


def ours(work: Work) -> Contestant:
    """`attention_jax.attention`. A LookupError, as from every peer, says why it is absent."""
    if work.implementation not in (None, *IMPLEMENTATIONS):
        raise LookupError(f"there is no implementation {work.implementation!r}")
    return jax_contestant(work, our_attention(work), implementation=_implementation(work))


def _implementation(work: Work) -> str:
    """The work's implementation, or the one that `attention` chooses."""
    if work.implementation is not None:
        return work.implementation
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, work.dtype), work.arrays()[0])
    inputs = Inputs(**arrays, mask=work.mask_object(), bias=None, dropout_rng=None)
    return chosen_implementation(work.score_object(), inputs, jax.default_backend())


def our_attention(work: Work) -> Callable[[Tree], Array]:
    """`attention` with the work's options, as a function of inputs like `work.arrays()`."""
    score, mask = work.score_object(), work.mask_object()

    def attend(inputs: Tree) -> Array:
        return attention(**inputs, score=score, mask=mask, implementation=work.implementation)

    return attend


def jax_contestant(
    work: Work,
    attend: Callable[[Tree], Array],
    layout: str = "BNTD",
    *,
    inputs: Tree | None = None,
    **about: Any,
) -> Contestant:
    """A compiled function of the work's inputs, or of other `inputs`."""
    work_inputs, cotangent = work.arrays()
    inputs = work_inputs if inputs is None else inputs
    if layout == "BTND":
        inputs |= {name: inputs[name].swapaxes(1, 2) for name in ("query", "key", "value")}
        cotangent = cotangent.swapaxes(1, 2)
    arguments: tuple = jax.tree.map(lambda leaf: jnp.asarray(leaf, work.dtype), (inputs, cotangent))
    program: Callable[..., Any] = attend
    if work.backward:
        program = forward_backward(attend)
    elif work.jvp:
        program, arguments = pushed_forward(attend), (arguments[0], arguments[0])
    else:
        arguments = arguments[:1]
    compiled = compile_cold(program, *arguments)
    if compiled.needed_bytes > _FREE_SHARE * free_bytes():
        needed, free = (size / 2**30 for size in (compiled.needed_bytes, free_bytes()))
        raise LookupError(f"it needs {needed:.1f} GiB, and {free:.1f} GiB are free")
    return Contestant(
        call=lambda: jax.block_until_ready(compiled.call(*arguments)),
        about={
            "layout": layout,
            "device": jax.default_backend(),
            "compile_seconds": compiled.compile_seconds,
            "temporary_mib": compiled.temporary_mib,
            **about,
        },
    )


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


def import_peer(module: str) -> Any:
    """The module; a LookupError that says how to install it if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LookupError(f"{reason}; {INSTALL}") from error
