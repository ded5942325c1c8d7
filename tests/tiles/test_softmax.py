"""The masked softmax: -inf as a mask, masked tangents, derivatives of both orders."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import S, T, allowed_table
from finite_differences import check_derivatives
from oracles import softmax

from attention_jax import masked_softmax

TABLE = allowed_table("dense")[0]  # its row 2 is all False


def logits_of(seed=0):
    return np.random.default_rng(seed).normal(size=(T, S))


def test_minus_infinity_is_a_mask_and_so_is_a_row_of_it():
    logits = jnp.asarray(np.where(TABLE, logits_of(), -np.inf), jnp.float32)

    def total(logits):
        return (masked_softmax(logits) ** 2).sum()

    weights, gradient = jax.jit(lambda x: (masked_softmax(x), jax.grad(total)(x)))(logits)
    np.testing.assert_allclose(weights, softmax(logits_of(), TABLE), atol=3e-7)
    assert np.isfinite(gradient).all()
    assert (gradient[~TABLE] == 0).all()
    assert np.abs(gradient[TABLE]).max() > 0.1


def test_masked_tangents_are_never_read():
    clean = jnp.asarray(logits_of(), jnp.float32)
    dirty = jnp.where(TABLE, clean, jnp.nan)
    tangent = jnp.asarray(logits_of(4), jnp.float32)
    push = jax.jit(lambda x, t: jax.jvp(lambda x: masked_softmax(x, TABLE), (x,), (t,))[1])
    expected = push(clean, jnp.where(TABLE, tangent, 0))
    got = push(dirty, jnp.where(TABLE, tangent, jnp.nan))
    np.testing.assert_array_equal(got, expected)
    w = softmax(logits_of(), TABLE)
    by_formula = w * (logits_of(4) - (w * logits_of(4)).sum(1, keepdims=True))
    np.testing.assert_allclose(got, by_formula, atol=1e-6)


def test_gradients_of_two_orders_in_both_modes():
    with jax.enable_x64(True):
        check_derivatives(lambda logits: masked_softmax(logits, TABLE, axis=0), logits_of())
