"""Gradients of statistics of attention: against finite differences, and finite at zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from statistics_cases import ALIGNMENT, COUNTED, FUNCTIONS, MASK, WEIGHTS, B, S, T, rows

from attention_jax import attention, attention_weights
from attention_jax.analysis import (
    attention_summary,
    effective_keys,
    jensen_shannon,
    logit_variance,
    normalized_entropy,
    saturation,
    weight_entropy,
)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"saturation"}))
def test_gradients(name):
    with jax.enable_x64(True):
        # None so small that finite differences would make it negative.
        weights = jnp.asarray((rows(B, T, S, dtype=np.float64) + 1 / S) / 2)

        @jax.jit
        def function(weights):
            # Weights that are 0, as a mask makes them, do not disturb the gradient of the rest.
            masked = jnp.where(MASK, weights, 0)
            return FUNCTIONS[name](masked, MASK, COUNTED, ALIGNMENT)

        check_grads(function, (weights,), order=2, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_gradients_of_jensen_shannon():
    with jax.enable_x64(True):
        a, b = (jnp.asarray(rows(2, T, S, dtype=np.float64)) + 1 / S) / 2
        function = jax.jit(jensen_shannon)
        check_grads(function, (a, b), order=2, modes=["rev"], atol=1e-5, rtol=1e-5)
        check_grads(function, (a, b), order=1, modes=["fwd"], atol=1e-5, rtol=1e-5)

        # Where they are equal it is least, and bends as much as Fisher's information says:
        # JS(a, a + e) = sum e^2 / (8 a).
        def total(b):
            return jnp.sum(jensen_shannon(a, b))

        np.testing.assert_allclose(jax.grad(total)(a), np.zeros((T, S)), atol=1e-15)
        flat = jax.hessian(total)(a).reshape(T * S, T * S)
        np.testing.assert_allclose(flat, np.diag(1 / (4 * a.ravel())), rtol=1e-9, atol=1e-9)


def test_gradients_through_the_softmax():
    """The entropy of weights has the gradient of the entropy of logits, which nothing clips."""
    rng = np.random.default_rng(9)
    query = jnp.asarray(rng.normal(size=(B, T, 3)).astype(np.float32))
    key = jnp.asarray(rng.normal(size=(B, S, 3)).astype(np.float32))

    def of_weights(query):
        return jnp.sum(weight_entropy(attention_weights(query, key, score="dot", mask=MASK)))

    def of_logits(query):
        options = {"score": "dot", "mask": MASK, "return_statistics": True}
        return jnp.sum(attention(query, key, key, **options)[1].entropy)

    np.testing.assert_allclose(jax.grad(of_weights)(query), jax.grad(of_logits)(query), atol=2e-6)


@jax.jit
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
            assert not np.any(gradient[at < np.finfo(np.float32).tiny])


def test_masked_places_and_rows_send_no_gradient():
    counted = MASK & COUNTED[..., None]
    held = jnp.where(counted, WEIGHTS, jnp.nan)

    def total(weights):
        summary = attention_summary(weights, mask=MASK, rows=COUNTED, alignment=ALIGNMENT)
        variances = logit_variance(weights, counted)
        return sum(map(jnp.sum, summary)) + jnp.sum(variances)

    gradient = jax.jit(jax.grad(total))(held)
    assert np.all(np.isfinite(gradient[counted]))
    assert np.any(gradient[counted] != 0)
    assert not np.any(gradient[~counted])


def test_saturation_has_gradient_zero():
    assert not np.any(jax.grad(lambda weights: saturation(weights[0], bound=0.4))(WEIGHTS))
