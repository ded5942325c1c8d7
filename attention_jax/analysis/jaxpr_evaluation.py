"""Evaluates a traced program, and also returns the arrays at its capture points.

A point may be inside of a `jit`, `checkpoint` or `scan` of the program. A `jit` or `checkpoint` is
evaluated in line. A `scan` is replaced by a scan whose body is evaluated in the same way, so that
it also returns the arrays at its points, stacked. A function with its own gradient rule keeps the
rule, and is computed twice. JAX evaluates equations without points as usual. A `checkpoint` in line
no longer saves memory: its gradient stores the residuals. Where the program itself contains the
gradient of a `checkpoint`, the recomputed points are ignored.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from attention_jax.analysis.capture_point import CapturedAttention, capture_p
from attention_jax.functional.attention import capturing

Array = jax.Array
Captures = list[tuple[str, CapturedAttention]]  # (name scopes, captured arrays)

IN_LINE = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2")
WITH_OWN_RULE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "kept_call")


def evaluate(
    program: ClosedJaxpr, arguments: Sequence[Array], added: Sequence[Array] | None = None
) -> tuple[list[Array], Captures]:
    """The program's outputs, and the arrays at its points, in the order of evaluation.

    Args:
        program: the result of `jax.make_jaxpr` while the function is captured.
        arguments: its flat arguments.
        added: for each point, an array to add to the output of attention there.

    Returns:
        (flat outputs, [(name scopes, captured arrays)]).

    Raises:
        NotImplementedError: a point is inside of a `while`, a `cond` or another call to which no
            results can be added.
    """
    summands = iter([None] * points_in(program.jaxpr) if added is None else added)
    return _evaluate_program(program, arguments, summands, "")


def points_in(jaxpr: Jaxpr) -> int:
    """The number of points in a program; the points in a loop's body count once."""
    return sum(_points_of(equation) for equation in jaxpr.eqns)


def _points_of(equation: JaxprEqn) -> int:
    if equation.primitive is capture_p:
        return 1
    if equation.params.get("differentiated") is True:
        return 0  # the gradient of a `checkpoint`, which recomputes points
    return sum(points_in(inner.jaxpr) for inner in programs_of(equation))


def programs_of(equation: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs among the parameters of an equation."""
    leaves = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    )
    # In newer versions of JAX the two are the same class, with constants.
    return [
        leaf if isinstance(leaf, ClosedJaxpr) else ClosedJaxpr(leaf, ())
        for leaf in leaves
        if isinstance(leaf, Jaxpr | ClosedJaxpr)
    ]


def _evaluate_program(
    program: ClosedJaxpr,
    arguments: Sequence[Any],
    added: Iterator[Array | None],
    scope: str,
) -> tuple[list[Array], Captures]:
    jaxpr = program.jaxpr
    environment: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    environment.update(zip(jaxpr.invars, arguments, strict=True))
    captures: Captures = []

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        name = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        with equation.ctx.manager:
            outputs, equation_captures = _evaluate_equation(equation, values, added, name)
        captures += equation_captures
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], captures


def _evaluate_equation(
    equation: JaxprEqn, values: list[Any], added: Iterator[Array | None], scope: str
) -> tuple[list[Array], Captures]:
    primitive = equation.primitive
    if primitive is capture_p:
        output, *leaves = values
        summand = next(added)
        if summand is not None:  # the summand has merged head axes
            output = output + summand.reshape(output.shape)
        if capturing.value is not None:  # an outer capture also captures this point
            output = capture_p.bind(output, *leaves, structure=equation.params["structure"])
        return [output], [(scope, jax.tree.unflatten(equation.params["structure"], leaves))]
    if _points_of(equation) == 0:
        return bind_eqn(equation, values), []
    if primitive.name == "scan":
        return _scan(equation, values, added, scope)
    if primitive.name in IN_LINE:
        (program,) = programs_of(equation)
        return _evaluate_program(program, values, added, scope)
    if primitive.name in WITH_OWN_RULE:
        return _with_own_rule(equation, values, added, scope)
    raise NotImplementedError(
        f"attention inside a {primitive.name} cannot be captured, only inside a jit, vmap,"
        " checkpoint or scan: capture the function that the loop or branch calls"
    )


def bind_eqn(equation: JaxprEqn, values: Sequence[Any]) -> list[Array]:
    """The outputs of an equation."""
    primitive = equation.primitive
    outputs = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return list(outputs) if primitive.multiple_results else [outputs]


def _with_own_rule(
    equation: JaxprEqn, values: list[Any], added: Iterator[Array | None], scope: str
) -> tuple[list[Array], Captures]:
    """A call with its own gradient rule: the outputs use the rule, the captures do not.

    The rule has no gradient for the arrays added inside of the call. A second evaluation without
    the rule has the added arrays, which are 0: only its gradient is used.
    """
    (program,) = programs_of(equation)
    outputs = bind_eqn(equation, values)
    summands = [next(added) for _ in range(points_in(program.jaxpr))]
    no_summands: Iterator[None] = iter([None] * len(summands))
    _, captures = _evaluate_program(program, values, no_summands, scope)
    if any(summand is not None for summand in summands):
        constants = [jax.lax.stop_gradient(value) for value in values]
        sums, _ = _evaluate_program(program, constants, iter(summands), scope)
        outputs = [
            _add_gradient_of(output, total) if jnp.issubdtype(output.dtype, jnp.inexact) else output
            for output, total in zip(outputs, sums, strict=True)
        ]
    return outputs, captures


@jax.custom_jvp
def _add_gradient_of(output: Array, other: Array) -> Array:
    """The value of the first array, with the gradients of both."""
    return output


@_add_gradient_of.defjvp
def _add_gradient_of_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _add_gradient_of(*primals), tangents[0] + tangents[1]


def _scan(
    equation: JaxprEqn, values: list[Any], added: Iterator[Array | None], scope: str
) -> tuple[list[Array], Captures]:
    (body,) = programs_of(equation)
    # A step's slice of a scanned array has one axis less than the array; constants and carries are
    # whole. (The equation has their numbers too, but under names that differ between versions.)
    whole = _of_equal_ndim(equation.invars, body.jaxpr.invars)
    carries = _of_equal_ndim(equation.outvars, body.jaxpr.outvars)
    constants, xs = values[: whole - carries], values[whole:]
    summands = [next(added) for _ in range(points_in(body.jaxpr))]
    scopes: list[str] = []

    def step(carry: list[Array], x: Any) -> Any:
        x, summands = x
        arguments = [*constants, *carry, *x]
        outputs, captures = _evaluate_program(body, arguments, iter(summands), scope)
        scopes[:] = [inner for inner, _ in captures]
        return outputs[:carries], (outputs[carries:], [arrays for _, arrays in captures])

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry = values[whole - carries : whole]
    carry, (ys, stacked) = jax.lax.scan(step, carry, (xs, summands), **options)
    return [*carry, *ys], list(zip(scopes, stacked, strict=True))


def _of_equal_ndim(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """The number of arrays that have as many axes outside of a scan as in a step."""
    pairs = zip(outer, inner, strict=True)
    return sum(len(one.aval.shape) == len(other.aval.shape) for one, other in pairs)
