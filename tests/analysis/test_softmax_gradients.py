"""The softmax's Jacobian, its norm and vector products, against NumPy, JAX and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import normal, softmax

from attention_jax import analysis

# Compiled as one program each. `test_jit_vmap_and_dtypes` calls them outside of `jax.jit`.
softmax_jacobian = quick_jit(analysis.softmax_jacobian)
softmax_jacobian_norm = quick_jit(analysis.softmax_jacobian_norm)
softmax_vjp = quick_jit(analysis.softmax_vjp)

B, T, S = 2, 5, 7


def jacobian_by_loops(row):
    size = len(row)
    return np.array(
        [[row[j] * ((j == k) - row[k]) for k in range(size)] for j in range(size)]
    ).reshape(size, size)


# --- the Jacobian ---


def test_jacobian_against_loops_and_jax():
    weights = softmax(normal(B, T, S))
    weights[1, 2] = 0  # a query without keys
    got = np.asarray(softmax_jacobian(weights.astype(np.float32)))
    assert got.shape == (B, T, S, S)
    for index in np.ndindex(B, T):
        np.testing.assert_allclose(got[index], jacobian_by_loops(weights[index]), atol=1e-7)
    with jax.enable_x64(True):
        logits = normal(S, dtype=float)
        expected = quick_jit(jax.jacrev(jax.nn.softmax))(logits)
        np.testing.assert_allclose(softmax_jacobian(softmax(logits)), expected, atol=1e-15)
    np.testing.assert_allclose(np.sum(got, -1), np.zeros((B, T, S)), atol=1e-7)
    np.testing.assert_array_equal(got, np.swapaxes(got, -1, -2))


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 100.0])
def test_norm_against_the_matrix_and_the_closed_form(scale):
    with jax.enable_x64(True):
        weights = softmax(scale * normal(B, T, S, dtype=float))
        got = np.asarray(softmax_jacobian_norm(weights))
        expected = [
            [np.linalg.norm(jacobian_by_loops(row)) for row in example] for example in weights
        ]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-15)
        squares, cubes = (weights**2).sum(-1), (weights**3).sum(-1)
        np.testing.assert_allclose(got**2, squares - 2 * cubes + squares**2, atol=1e-14)
        assert np.all(got <= 0.5)


def test_norm_of_saturated_rows_keeps_its_digits():
    # Of (1 - e, e) it is 2 e (1 - e); of e shared by n equal keys, e sqrt(1 + 1/n + 1/n + 1/n^2)
    # to first order: rows J_mm = e, J_mj = -e/n (twice n of them), J_jj = e/n.
    small = np.array([1e-3, 1e-6, 1e-9, 1e-15, 1e-30], np.float32)
    two = np.stack([1 - small, small], axis=-1)
    wide = small.astype(np.float64)
    np.testing.assert_allclose(softmax_jacobian_norm(two), 2 * wide * (1 - wide), rtol=1e-6)
    four = np.stack([small / 3, small / 3, 1 - small, small / 3], axis=-1)
    expected = wide * np.sqrt(1 + 2 / 3 + 1 / 3)
    np.testing.assert_allclose(np.asarray(softmax_jacobian_norm(four))[1:], expected[1:], rtol=3e-6)
    one_hot = np.eye(S, dtype=np.float32)
    np.testing.assert_array_equal(softmax_jacobian_norm(one_hot), np.zeros(S))
    np.testing.assert_array_equal(softmax_jacobian(one_hot), np.zeros((S, S, S)))


# --- vector products ---


def test_a_cotangent_of_a_masked_weight_may_be_anything():
    weights = jnp.array([[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    dweights = jnp.array([[1.0, jnp.nan, 3.0, jnp.inf], [jnp.nan] * 4])
    np.testing.assert_array_equal(
        softmax_vjp(weights, dweights), [[-0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    )
