"""The equations of a program, and the dtypes of its matrix products."""

import jax

from attention_jax.analysis.jaxpr_evaluation import programs_of


def equations(jaxpr):
    """Yields the equations of a program and of all programs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in programs_of(equation):
            yield from equations(inner.jaxpr)


def product_dtypes(function, *arguments):
    """The dtypes of the two factors of each matrix product that `function(*arguments)` runs."""
    return {
        tuple(factor.aval.dtype.name for factor in equation.invars)
        for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr)
        if equation.primitive.name == "dot_general"
    }
