"""First and second derivatives of several functions, in one program, against differences."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import quick_jit

STEP = 1e-5


def check_two_orders(functions, arrays, tolerance):
    """Asserts reverse mode, twice. To be used under `enable_x64`.

    Each function becomes a number, by fixed weights of its results. Its derivative along a
    direction, and the derivative along that direction of its derivative along another one, are
    compared with central differences.

    Args:
        functions: {name: function of the arrays that returns a tree of arrays}.
        arrays: tuple of float64 arrays.
        tolerance: absolute and relative.
    """
    rng = np.random.default_rng(21)
    along, other = ([rng.normal(size=np.shape(array)) for array in arrays] for _ in range(2))

    def derivative(number, direction):
        def of_arrays(*arrays):
            gradients = jax.grad(number, range(len(arrays)))(*arrays)
            return sum(jnp.vdot(*pair) for pair in zip(gradients, direction, strict=True))

        return of_arrays

    def number_of(function):
        def number(*arrays):
            leaves = jax.tree.leaves(function(*arrays))
            return sum(jnp.vdot(leaf, np.cos(np.arange(leaf.size))) for leaf in leaves)

        return number

    @quick_jit
    def values_and_derivatives(*arrays):
        found = {}
        for name, function in functions.items():
            first = number_of(function)
            second = derivative(first, other)
            both = jnp.stack([first(*arrays), second(*arrays)])
            found[name] = both, jnp.stack([derivative(f, along)(*arrays) for f in (first, second)])
        return found

    below, at, above = (
        values_and_derivatives(*(x + h * d for x, d in zip(arrays, along, strict=True)))
        for h in (-STEP, 0, STEP)
    )
    for name, (_, derivatives) in at.items():
        expected = (np.asarray(above[name][0]) - np.asarray(below[name][0])) / (2 * STEP)
        np.testing.assert_allclose(
            derivatives, expected, rtol=tolerance, atol=tolerance, err_msg=name
        )
        assert derivatives[0] != 0, name
