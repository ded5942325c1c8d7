"""Derivatives: inputs in float64, a number of all results of attention, central differences."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from conformance import SCORE_CASES
from oracles import assert_close
from quick_compilation import quick_jit

T, S, DV = 5, 7, 2
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(4)}


normal = functools.partial(oracles.normal, dtype=float)


def point_of(score_name, target=T, source=S):
    case = SCORE_CASES[score_name]
    params = case.score.init(jax.random.key(1), case.query_dim, 11)
    return {
        "query": normal(target, case.query_dim),
        "key": normal(source, 11),
        "value": normal(source, DV),
        "bias": normal(target, source),
        "params": jax.tree.map(np.float64, params),
    }


def numbers_of(output_and_statistics):
    """Returns one number that depends on every entry of the results in a different way."""
    output, statistics = output_and_statistics
    finite = jnp.where(jnp.isfinite(statistics.logsumexp), statistics.logsumexp, 0)
    wide = statistics.entropy.dtype
    total = jnp.zeros((), wide)
    for array in (output, finite, statistics.entropy):
        weights = np.cos(np.arange(array.size)).reshape(array.shape).astype(array.dtype)
        total = total + (jnp.sin(array) * weights).sum().astype(wide)
    return total


def agree(got, expected, tolerance=1e-11):
    """Asserts that no gradient is 0 everywhere, too."""
    assert_close("", got, expected, tolerance)
    assert all(map(np.any, jax.tree.leaves(got))), got


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
