"""Gradients of statistics of attention: against finite differences, and finite at zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import assert_leaves_close
from statistics_cases import ALIGNMENT, COUNTED, FUNCTIONS, MASK, WEIGHTS, B, S, T, rows

from attention_jax.analysis import (
    attention_summary,
    effective_keys,
    jensen_shannon,
    logit_variance,
    normalized_entropy,
    weight_entropy,
)


def masked(function):
    """Weights that are 0, as a mask makes them, do not disturb the gradient of the rest."""
    return lambda weights: function(jnp.where(MASK, weights, 0), MASK, COUNTED, ALIGNMENT)


def test_two_derivatives_along_a_direction():
    """Against central differences."""
    # None so small that finite differences would make it negative.
    weights = (rows(B, T, S, dtype=np.float64) + 1 / S) / 2
    direction, step = rows(B, T, S, seed=1, dtype=np.float64), 1e-5

    def functions(weights):
        return {name: masked(f)(weights) for name, f in FUNCTIONS.items() if name != "saturation"}

    def with_slopes(weights):
        return jax.jvp(functions, (weights,), (direction,))

    @quick_jit
    def both_orders(weights):
        return jax.jvp(with_slopes, (weights,), (direction,))

    with jax.enable_x64(True):
        _, got = both_orders(weights)
        after, before = (both_orders(weights + sign * step * direction)[0] for sign in (1, -1))
    after, before = jax.device_get((after, before))
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), after, before)
    assert_leaves_close(got, expected, rtol=1e-7, atol=1e-7)


@quick_jit
def derivatives_of_entropies(a, b):
    """The value, both gradients, and their derivatives in the direction of (a, b)."""

    def total(a, b):
        entropies = weight_entropy(a) + effective_keys(a) + normalized_entropy(b)
        return jnp.sum(entropies + jensen_shannon(a, b))

    gradients, products = jax.jvp(jax.grad(total, (0, 1)), (a, b), (a, b))
    return total(a, b), gradients, products  # a curvature is 1 / size, times size


@pytest.mark.parametrize("size", [0, 1e-45, 1e-38, 1.2e-38, 1e-30, 1e-20, 1e-7])
def test_small_weights_have_finite_derivatives(size):
    weights = np.array([[1, size, 0], [size, size, 0], [0.5, 0.5, size]], np.float32)
    others = np.array([[1, 0, size], [1, 0, 0], [size, size, size]], np.float32)
    pairs = [(weights, others), (others, weights), (weights, weights), (weights, weights[::-1])]
    for a, b in pairs:
        value, gradients, products = derivatives_of_entropies(a, b)
        for array in (value, *gradients, *products):
            assert np.all(np.isfinite(array))
        for gradient, at in zip(gradients, (a, b), strict=True):
            assert not np.any(np.asarray(gradient)[at < np.finfo(np.float32).tiny])


def test_masked_places_and_rows_send_no_gradient():
    counted = MASK & COUNTED[..., None]
    held = np.where(counted, WEIGHTS, np.float32(np.nan))

    def total(weights):
        summary = attention_summary(weights, mask=MASK, rows=COUNTED, alignment=ALIGNMENT)
        variances = logit_variance(weights, counted)
        return sum(map(jnp.sum, summary)) + jnp.sum(variances)

    gradient = np.asarray(quick_jit(jax.grad(total))(held))
    assert np.all(np.isfinite(gradient[counted]))
    assert np.any(gradient[counted] != 0)
    assert not np.any(gradient[~counted])
