"""Evaluates a traced program, taking out what its capture points hold.

A point may stand inside a `jit`, `checkpoint` or `scan` of the program. The first two are evaluated
in line; a `scan` is made anew, its body evaluated in this way, so that what the points in it hold
comes out stacked. A function with a gradient rule of its own keeps the rule, and is computed twice.
Whatever has no points is evaluated as JAX does it. A `checkpoint` in line is none: its gradient
saves what it would have computed again. Where the program itself takes the gradient of a
`checkpoint`, the points that are computed again for it are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from attention_jax.functional.capture_point import CapturedAttention, capture_p, capturing

Array = jax.Array
Found = list[tuple[str, CapturedAttention]]  # with the name scopes it stands in

_IN_LINE = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
_WITH_OWN_RULE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def evaluate(
    program: ClosedJaxpr, arguments: Sequence[Array], added: Sequence[Array] | None = None
) -> tuple[list[Array], Found]:
    """The program's outputs, and what its points hold, in the order of evaluation.

    Args:
        program: what `jax.make_jaxpr` made while `capture_points` was open.
        arguments: its flat arguments.
        added: for each point an array like the output seen there, to add to it.

    Returns:
        (flat outputs, [(name scopes, what was seen there)]).

    Raises:
        NotImplementedError: a point is in a `while`, a `cond` or another call that cannot be made
            to give out more than it does.
    """
    summands = iter([None] * points_in(program.jaxpr) if added is None else added)
    return _evaluate(program.jaxpr, program.consts, arguments, summands, "")


def points_in(jaxpr: Jaxpr) -> int:
    """How many points a program has; those of a loop's body count once."""
    return sum(_points_of(equation) for equation in jaxpr.eqns)


def _points_of(equation: JaxprEqn) -> int:
    if equation.primitive is capture_p:
        return 1
    if equation.params.get("differentiated") is True:
        return 0  # the gradient of a `checkpoint`, which computes again what has been seen
    return sum(points_in(inner.jaxpr) for inner in _programs_of(equation))


def _programs_of(equation: JaxprEqn) -> list[ClosedJaxpr]:
    leaves = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    )
    # In newer versions of JAX the two are one class, whose constants must not be lost.
    return [
        leaf if isinstance(leaf, ClosedJaxpr) else ClosedJaxpr(leaf, ())
        for leaf in leaves
        if isinstance(leaf, Jaxpr | ClosedJaxpr)
    ]


def _evaluate(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    added: Iterator[Array | None],
    scope: str,
) -> tuple[list[Array], Found]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    found: Found = []

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        name = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        with equation.ctx.manager:
            outputs, inner = _evaluate_equation(equation, values, added, name)
        found += inner
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], found


def _evaluate_equation(
    equation: JaxprEqn, values: list[Any], added: Iterator[Array | None], scope: str
) -> tuple[list[Array], Found]:
    primitive = equation.primitive
    if primitive is capture_p:
        output, *held = values
        summand = next(added)
        if summand is not None:  # it has the heads as one axis
            output = output + summand.reshape(output.shape)
        if capturing() is not None:  # in a capture around this one it is a point as well
            output = capture_p.bind(output, *held, structure=equation.params["structure"])
        return [output], [(scope, jax.tree.unflatten(equation.params["structure"], held))]
    if _points_of(equation) == 0:
        return _as_jax_does(equation, values), []
    if primitive.name == "scan":
        return _scan(equation, values, added, scope)
    if primitive.name in _IN_LINE:
        (program,) = _programs_of(equation)
        return _evaluate(program.jaxpr, program.consts, values, added, scope)
    if primitive.name in _WITH_OWN_RULE:
        return _with_own_rule(equation, values, added, scope)
    raise NotImplementedError(
        f"attention inside a {primitive.name} cannot be captured: only a jit, vmap, checkpoint or"
        " scan can give out what is in it. Capture what the loop or branch calls"
    )


def _as_jax_does(equation: JaxprEqn, values: list[Any]) -> list[Array]:
    primitive = equation.primitive
    outputs = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return list(outputs) if primitive.multiple_results else [outputs]


def _with_own_rule(
    equation: JaxprEqn, values: list[Any], added: Iterator[Array | None], scope: str
) -> tuple[list[Array], Found]:
    """Outputs differentiate as the rule says; what is in the call stands beside them.

    The rule knows nothing of what is added in there. What that does to the outputs comes from the
    call as it is computed, and its value, 0, is not needed: only its gradient.
    """
    (program,) = _programs_of(equation)
    outputs = _as_jax_does(equation, values)
    summands = [next(added) for _ in range(points_in(program.jaxpr))]
    nothing: Iterator[None] = iter([None] * len(summands))
    _, found = _evaluate(program.jaxpr, program.consts, values, nothing, scope)
    if any(summand is not None for summand in summands):
        fixed = [jax.lax.stop_gradient(value) for value in values]
        moved, _ = _evaluate(program.jaxpr, program.consts, fixed, iter(summands), scope)
        outputs = [
            _with_gradient_of(output, other)
            if jnp.issubdtype(output.dtype, jnp.inexact)
            else output
            for output, other in zip(outputs, moved, strict=True)
        ]
    return outputs, found


@jax.custom_jvp
def _with_gradient_of(output: Array, other: Array) -> Array:
    """The first as it is; the gradients of both."""
    del other
    return output


@_with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _with_gradient_of(*primals), tangents[0] + tangents[1]


def _scan(
    equation: JaxprEqn, values: list[Any], added: Iterator[Array | None], scope: str
) -> tuple[list[Array], Found]:
    (body,) = _programs_of(equation)
    # What a step takes and gives of a longer array has an axis less than the array. (The numbers of
    # constants and carries are parameters of the equation whose names differ between versions.)
    sliced = [
        _ndim(outer) > _ndim(inner)
        for outer, inner in zip(equation.invars, body.jaxpr.invars, strict=True)
    ]
    carries = sum(
        _ndim(outer) == _ndim(inner)
        for outer, inner in zip(equation.outvars, body.jaxpr.outvars, strict=True)
    )
    constants = len(values) - sum(sliced) - carries
    shared, carry, xs = (
        values[:constants],
        values[constants : constants + carries],
        values[constants + carries :],
    )
    summands = [next(added) for _ in range(points_in(body.jaxpr))]
    scopes: list[str] = []

    def step(carry: list[Array], x: Any) -> Any:
        x, summands = x
        arguments = [*shared, *carry, *x]
        outputs, found = _evaluate(body.jaxpr, body.consts, arguments, iter(summands), scope)
        scopes[:] = [inner for inner, _ in found]
        return outputs[:carries], (outputs[carries:], [held for _, held in found])

    length, reverse = equation.params["length"], equation.params["reverse"]
    carry, (ys, held) = jax.lax.scan(
        step,
        carry,
        (xs, summands),
        length=length,
        reverse=reverse,
        unroll=equation.params["unroll"],
    )
    return [*carry, *ys], list(zip(scopes, held, strict=True))


def _ndim(atom: Any) -> int:
    return len(atom.aval.shape)
