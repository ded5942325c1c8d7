"""First and second derivatives against central differences, all by one compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import assert_close, named, quick_jit

STEP = 3e-5
TOLERANCE = 1e-6  # relative to the largest entry of a leaf; the largest error seen is 4e-8


def check_derivatives(functions, *point, forward=True):
    """Asserts that the derivatives of each function at the point equal central differences.

    To be used under `enable_x64`. Each function becomes a number (`_number_of`). Its first
    derivatives are compared along a random direction in one leaf of the point at a time, and its
    second derivatives along a random direction in all leaves. A derivative of 0 fails too: two
    zeros agree, whatever the rule.

    Args:
        functions: a function of `*point` that returns a tree of float64 arrays, or
            {name: function}. Each must depend on every leaf of the point.
        point: trees of arrays.
        forward: True checks reverse mode, forward mode and the four compositions of two of them.
            False checks reverse mode and reverse over reverse mode.
    """
    if callable(functions):
        functions = {getattr(functions, "__name__", type(functions).__name__): functions}
    rng = np.random.default_rng(0)
    point = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), point)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), point)
    length = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(direction)))
    direction = jax.tree.map(lambda leaf: leaf / length, direction)

    @quick_jit
    def derivatives_of_all(point, direction):
        return {
            name: _derivatives(_number_of(function), point, direction, forward)
            for name, function in functions.items()
        }

    def derivatives_and_differences(direction):
        def at(step):
            moved = jax.tree.map(lambda leaf, along: leaf + step * along, point, direction)
            return jax.tree.map(np.asarray, derivatives_of_all(moved, direction))

        differences = jax.tree.map(lambda a, b: (a - b) / (2 * STEP), at(STEP), at(-STEP))
        return at(0), differences

    for path in named(point):
        derivatives, differences = derivatives_and_differences(_in_one_leaf(direction, path))
        for name in functions:
            for mode, slope in derivatives[name]["slopes"].items():
                label = f"{name}: {mode} mode, leaf {path}"
                _check(label, slope, differences[name]["value"])
    derivatives, differences = derivatives_and_differences(direction)
    for name in functions:
        _check_second_order(name, derivatives[name]["second"], differences[name])


def _number_of(function):
    """Returns a function from the point to a number: a weighted sum of sines of all results.

    The sines give linear functions a second derivative too.
    """

    def number(point):
        rng = np.random.default_rng(1)
        leaves = jax.tree.leaves(function(*point))
        return sum(jnp.sum(jnp.sin(leaf) * rng.uniform(1, 2, leaf.shape)) for leaf in leaves)

    return number


def _derivatives(number, point, direction, forward):
    """Returns the number, its gradient, its slopes along the direction and their derivatives."""

    def reverse_slope(point):
        value, gradient = jax.value_and_grad(number)(point)
        pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        return sum(jnp.vdot(*pair) for pair in pairs), (value, gradient)

    def forward_slope(point):
        return jax.jvp(number, (point,), (direction,))[1]

    def along(function):
        return jax.jvp(function, (point,), (direction,))

    (slope, (value, gradient)), product = jax.value_and_grad(reverse_slope, has_aux=True)(point)
    slopes, second = {"reverse": slope}, {"reverse over reverse": product}
    if forward:
        slopes["forward"], second["forward over forward"] = along(forward_slope)
        second["forward over reverse"] = along(jax.grad(number))[1]
        second["reverse over forward"] = jax.grad(forward_slope)(point)
    return {"value": value, "gradient": gradient, "slopes": slopes, "second": second}


def _in_one_leaf(direction, path):
    """Returns the direction with zeros in all leaves except the one at the path."""
    leaves = [leaf * (name == path) for name, leaf in named(direction).items()]
    return jax.tree.unflatten(jax.tree.structure(direction), leaves)


def _check_second_order(name, second, differences):
    for mode, derivative in second.items():
        label = f"{name}: {mode} mode"
        if mode == "forward over forward":
            _check(label, derivative, differences["slopes"]["reverse"])
            continue
        expected = named(differences["gradient"])
        for path, leaf in named(derivative).items():
            _check(f"{label}, leaf {path}", leaf, expected[path])


def _check(label, derivative, difference):
    assert_close(label, derivative, difference, TOLERANCE)
    assert np.any(derivative), f"{label}: the derivative is 0"
