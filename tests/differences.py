"""First and second derivatives against central differences, all by one compiled program."""

import jax
import numpy as np
from conformance import named, quick_jit

STEP = 1e-4


def check_derivatives(function, *point, forward=True, tolerance=1e-6):
    """Asserts that derivatives of `function(*point)` are its central differences, in float64.

    Checks first derivatives in reverse mode and, if `forward`, in forward mode, and second
    derivatives in reverse mode over reverse mode, all along one random direction. Returns the
    gradient of a random projection of the results, a tuple like `point`.
    """
    rng = np.random.default_rng(0)
    point = jax.tree.map(np.float64, point)
    shapes = jax.eval_shape(function, *point)
    cotangent = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), point)
    length = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(direction)))
    direction = jax.tree.map(lambda leaf: leaf / length, direction)

    def inner(left, right):
        return sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), left, right)))

    def projection(point):
        return inner(function(*point), cotangent)

    def slope(point):
        value, gradient = jax.value_and_grad(projection)(point)
        return inner(gradient, direction), (value, gradient)

    @quick_jit
    def derivatives(point):
        (reverse, (value, gradient)), second = jax.value_and_grad(slope, has_aux=True)(point)
        slopes = {"reverse": reverse}
        if forward:
            slopes["forward"] = jax.jvp(projection, (point,), (direction,))[1]
        return value, gradient, slopes, second

    def after(step):
        moved = jax.tree.map(lambda leaf, along: leaf + step * along, point, direction)
        return jax.tree.map(np.asarray, derivatives(moved))

    _, gradient, slopes, second = after(0)
    values, gradients, *_ = zip(after(STEP), after(-STEP), strict=True)
    difference = (values[0] - values[1]) / (2 * STEP)
    for mode, found in slopes.items():
        np.testing.assert_allclose(found, difference, tolerance, tolerance, err_msg=mode)
    differences = jax.tree.map(lambda right, left: (right - left) / (2 * STEP), *gradients)
    expected = named(differences)
    for name, found in named(second).items():
        np.testing.assert_allclose(found, expected[name], tolerance, tolerance, err_msg=name)
    return gradient
