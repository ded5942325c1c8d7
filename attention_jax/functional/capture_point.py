"""Where attention can be looked into: each call is a point in the traced program, on request.

While `capturing` is on, every attention passes its output through a primitive that does nothing but
hold, as further operands, what is to be seen of the call. `analysis.capture` traces a function so,
and then evaluates the program, taking out what stands at those points. Off, which is the default,
programs have no such points.

It is a primitive since a Python list would be handed tracers that a `scan`, `vmap` or
`checkpoint` inside the function does not let out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attention_jax.functional.heads import ungroup_heads
from attention_jax.implementations import Inputs
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.scores import ProjectedKeys

Array = jax.Array


class CapturedAttention(NamedTuple):
    """One call of attention; all arrays have its batch axes *B in front, nothing is shared.

    In front of *B stand the axes of whatever the call was in: the length of a `scan`, the size of a
    `vmap`.
    """

    query: Array  # [*B, T, Dq]
    key: Any  # [*B, S, Dk]; or `ProjectedKeys`, if the call was given those
    value: Array  # [*B, S, Dv]
    output: Array  # [*B, T, Dv]
    logits: Array | None  # [*B, T, S] with the bias, -inf where masked; None if there is no softmax
    weights: Array | None  # [*B, T, S] before dropout; None if matrices were not asked for
    mask: Array | None  # bool [*B, T, S]; None if matrices were not asked for
    statistics: AttentionStatistics | None  # [*B, T]; None if there is no softmax


class Capturing(NamedTuple):
    """What is to be seen."""

    matrices: bool  # logits, weights and mask, which take memory T S
    grouped_heads: int | None = None  # *B, K, G have to become *B, N: the number of axes *B


# A context that JAX counts among what a compiled function depends on: a function that was compiled
# without points is traced anew.
_capturing = jax.make_user_context(default_value=None)


def capturing() -> Capturing | None:
    """What is to be seen of each attention, or None."""
    return _capturing.value


def capture_points(matrices: bool) -> contextlib.AbstractContextManager[Any]:
    """While it is open, whatever is traced has a point at each attention."""
    return _capturing(Capturing(matrices))


def no_capture_points() -> contextlib.AbstractContextManager[Any]:
    """While it is open, there are none: for what is attention inside, and not to its caller."""
    return _capturing(None)


@contextlib.contextmanager
def heads_as_one_axis(batch_ndim: int) -> Iterator[None]:
    """While it is open, batch axes [*B, K, G] are captured as [*B, N]."""
    current = capturing()
    if current is None:
        yield
        return
    with _capturing(current._replace(grouped_heads=batch_ndim)):
        yield


def capture_point(output: Array, seen: Callable[[Capturing], CapturedAttention]) -> Array:
    """The output as it is; a point, if such are wanted, that holds what `seen` makes."""
    current = capturing()
    if current is None:
        return output
    held = seen(current)
    if current.grouped_heads is not None:
        held = ungroup_heads(held, current.grouped_heads)
    leaves, structure = jax.tree.flatten(held)
    return capture_p.bind(output, *leaves, structure=structure)


def seen_from_outside(
    inputs: Inputs, output: Array, weights: Array | None, what: Capturing
) -> CapturedAttention:
    """What can be said of any attention: no logits and no statistics."""
    *batch_shape, _, _ = inputs.query.shape
    shape = (inputs.query.shape[-2], inputs.key.shape[-2])

    def with_batch_axes(array: Array, core_ndim: int = 2) -> Array:
        return jnp.broadcast_to(array, (*batch_shape, *array.shape[array.ndim - core_ndim :]))

    key, projected = inputs.key, isinstance(inputs.key, ProjectedKeys)
    key = key.map(with_batch_axes) if projected else with_batch_axes(key)
    mask = None
    if what.matrices:
        table = True if inputs.mask is None else inputs.mask.materialize(*shape)
        mask = jnp.broadcast_to(table, (*batch_shape, *shape))
    return CapturedAttention(
        query=inputs.query,
        key=key,
        value=with_batch_axes(inputs.value),
        output=output,
        logits=None,
        weights=weights if what.matrices else None,
        mask=mask,
        statistics=None,
    )


# --- the primitive: its first operand, whatever the others are ---

capture_p = Primitive("attention")
capture_p.def_impl(lambda output, *held, structure: output)
capture_p.def_abstract_eval(lambda output, *held, structure: output)
mlir.register_lowering(capture_p, lambda context, output, *held, structure: [output])


def _jvp(primals: Any, tangents: Any, *, structure: Any) -> tuple[Any, Any]:
    return capture_p.bind(*primals, structure=structure), tangents[0]


def _batch(operands: Any, axes: Any, *, structure: Any) -> tuple[Any, int]:
    """All with the new axis in front, so that those who take them out know where it is."""
    size = next(
        operand.shape[axis]
        for operand, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    moved = [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if axis is None
        else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    return capture_p.bind(*moved, structure=structure), 0


ad.primitive_jvps[capture_p] = _jvp
batching.primitive_batchers[capture_p] = _batch
