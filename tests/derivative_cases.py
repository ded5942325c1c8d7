"""Inputs in float64, and a loss of all results of attention, for comparing derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import SCORE_CASES, TILE, assert_close, named, quick_jit

import attention_jax as aj

T, S, DV = 5, 7, 2
RNG = np.random.default_rng(12)
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(4)}


def normal(*shape):
    """Returns float64 numbers, for use under `enable_x64`."""
    return RNG.normal(size=shape)


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


def loss_of(score_name, implementation, **options):
    def loss(point, mask):
        return numbers_of(
            aj.attention(
                **point, mask=mask, score=SCORE_CASES[score_name].score, return_statistics=True,
                implementation=implementation, **{"block_sizes": TILE, **options},
            )
        )  # fmt: skip

    return loss


def agree(got, expected, tolerance=1e-11):
    got, expected = named(got), named(expected)
    assert got.keys() == expected.keys()
    for name, array in got.items():
        assert_close(name, array, np.asarray(expected[name]).astype(np.float64), tolerance)
        assert np.any(array), name


def check_two_orders(function, point, tolerance=1e-6):
    """Compares derivatives in every order of the modes with central differences, in float64.

    `function` takes the leaves of `point` as arguments. One compiled program computes all
    derivatives along one random direction.
    """
    rng, step = np.random.default_rng(6), 1e-5
    point = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tuple(point))
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), point)

    def loss(point):
        leaves = jax.tree.leaves(function(*point))
        weights = [np.cos(np.arange(leaf.size)).reshape(leaf.shape) for leaf in leaves]
        return sum(jnp.sum(jnp.sin(a) * b) for a, b in zip(leaves, weights, strict=True))

    def along(gradient):
        pairs = zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
        return sum(jnp.vdot(a, b) for a, b in pairs)

    @quick_jit
    def derivatives(point):
        def slope(point):
            return jax.jvp(loss, (point,), (direction,))

        gradient, product = jax.jvp(jax.grad(loss), (point,), (direction,))
        (value, first), (_, curvature) = jax.jvp(slope, (point,), (direction,))
        products = (
            product,
            jax.grad(lambda point: slope(point)[1])(point),
            jax.grad(lambda point: along(jax.grad(loss)(point)))(point),
        )
        return (value, gradient), (first, along(gradient)), products, curvature

    def moved(size):
        return jax.tree.map(lambda leaf, towards: leaf + size * towards, point, direction)

    (above, *_), (below, *_) = derivatives(moved(step)), derivatives(moved(-step))
    slope, product = jax.tree.map(lambda a, b: np.asarray(a - b) / (2 * step), above, below)
    _, slopes, products, curvature = derivatives(point)
    for got in slopes:
        assert_close("slope", got, slope, tolerance)
    for got in products:
        for name, leaf in named(got).items():
            assert_close(name, leaf, named(product)[name], tolerance)
    assert_close("curvature", curvature, along(product), tolerance)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(product))
