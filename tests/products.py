"""The dtypes of the matrix products in a program."""

import jax


def product_dtypes(function, *arguments):
    """The dtypes of the two factors of each matrix product that `function(*arguments)` runs."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield tuple(factor.aval.dtype.name for factor in equation.invars)
            for value in jax.tree.leaves(
                equation.params,
                is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"),
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return set(walk(jax.make_jaxpr(function)(*arguments).jaxpr))
