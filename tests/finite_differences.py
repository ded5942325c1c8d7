"""First and second derivatives of a function in every mode, against central differences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from quick_compilation import quick_jit


def check_derivatives(function, *point):
    """Asserts that all modes give the differences along one direction; under `enable_x64`.

    Args:
        function: of `*point`; returns a tree of float64 arrays.
        point: trees of arrays.
    """
    point = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), point)
    direction = jax.tree.map(np.cos, point)

    def loss(point):
        leaves = jax.tree.leaves(function(*point))
        return sum(jnp.vdot(x, np.cos(np.arange(x.size).reshape(x.shape))) for x in leaves)

    def along(function):
        return lambda point: jax.jvp(function, (point,), (direction,))[1]

    def product(tree):
        return sum(jax.tree.leaves(jax.tree.map(lambda x, d: (x * d).sum(), tree, direction)))

    @quick_jit
    def derivatives(point):
        slope, gradient = along(loss), jax.grad(loss)
        products = jax.grad(slope), along(gradient), jax.grad(lambda x: product(gradient(x)))
        second = [*(of(point) for of in products), along(slope)(point)]
        return (loss(point), gradient(point)), (slope(point), product(gradient(point))), second

    def at(size):
        return jax.device_get(
            derivatives(jax.tree.map(lambda x, d: x + size * d, point, direction))
        )

    step = 1e-5
    (below, _, _), (_, first, second), (above, _, _) = map(at, (-step, 0, step))
    slope, curvature = jax.tree.map(lambda x, y: (y - x) / (2 * step), below, above)
    expected = [slope] * 2, [curvature] * 3 + [product(curvature)]
    chex.assert_trees_all_close([*first], expected[0], rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(second, expected[1], rtol=1e-6, atol=1e-6)
