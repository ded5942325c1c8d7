"""The masked softmax: values, gradients of both orders, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import S, T, allowed_table
from finite_differences import check_derivatives

from attention_jax import masked_softmax

TABLE = allowed_table("dense")[0]  # its row 2 is all False


def logits_of(seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(size=(T, S)) * scale


def softmax_by_loops(logits, allowed):
    weights = np.zeros(logits.shape)
    for i, row in enumerate(logits):
        total = sum(np.exp(row[j]) for j in range(len(row)) if allowed[i, j])
        for j in range(len(row)):
            if allowed[i, j]:
                weights[i, j] = np.exp(row[j]) / total
    return weights


@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_any_axis(axis):
    logits = logits_of().astype(np.float32)
    expected = np.exp(logits) * TABLE
    total = expected.sum(axis, keepdims=True)
    expected = expected / np.where(total == 0, 1, total)
    np.testing.assert_allclose(masked_softmax(logits, TABLE, axis), expected, atol=3e-7)
    # dl_j = w_j (dw_j - sum_k w_k dw_k), with the sum along the axis
    dweights = np.cos(np.arange(T * S)).reshape(T, S)
    gradient = jax.grad(lambda x: jnp.sum(masked_softmax(x, TABLE, axis) * dweights))(logits)
    mean = (expected * dweights).sum(axis, keepdims=True)
    np.testing.assert_allclose(gradient, expected * (dweights - mean), atol=1e-6)


def test_minus_infinity_is_a_mask_and_so_is_a_row_of_it():
    logits = jnp.asarray(np.where(TABLE, logits_of(), -np.inf), jnp.float32)

    def total(logits):
        return (masked_softmax(logits) ** 2).sum()

    expected = softmax_by_loops(logits_of(), TABLE)
    np.testing.assert_allclose(masked_softmax(logits), expected, atol=3e-7)
    gradient = jax.jit(jax.grad(total))(logits)
    second = jax.jit(jax.hessian(total))(logits)
    assert np.isfinite(gradient).all()
    assert np.isfinite(second).all()
    assert (gradient[~TABLE] == 0).all()
    assert (second[~TABLE] == 0).all()
    assert np.abs(gradient[TABLE]).max() > 0.1


def test_masked_tangents_are_never_read():
    clean = jnp.asarray(logits_of(), jnp.float32)
    dirty = jnp.where(TABLE, clean, jnp.nan)
    tangent = jnp.asarray(logits_of(4), jnp.float32)
    _, expected = jax.jvp(
        lambda x: masked_softmax(x, TABLE), (clean,), (jnp.where(TABLE, tangent, 0),)
    )
    poisoned = jnp.where(TABLE, tangent, jnp.nan)
    _, got = jax.jvp(lambda x: masked_softmax(x, TABLE), (dirty,), (poisoned,))
    np.testing.assert_array_equal(got, expected)
    w = softmax_by_loops(logits_of(), TABLE)
    by_formula = w * (logits_of(4) - (w * logits_of(4)).sum(1, keepdims=True))
    np.testing.assert_allclose(got, by_formula, atol=1e-6)


def test_gradients_of_two_orders_in_both_modes():
    with jax.enable_x64(True):
        check_derivatives(lambda logits: masked_softmax(logits, TABLE), logits_of())
