"""Scores of literature.py where their formulas are singular or cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import normal
from score_cases import numpy_params

from attention_jax.scores.literature import LITERATURE, Softplus


@pytest.mark.parametrize("name", LITERATURE)
def test_equal_tokens_and_zeros_have_finite_derivatives(name):
    """Of first and second order."""
    score, tokens = LITERATURE[name], normal(4, 6)
    tokens[1] = 0

    def total(arrays):
        return jnp.sum(jnp.sin(score(*arrays)))

    @quick_jit
    def first_and_second(arrays):
        return jax.jvp(jax.grad(total), (arrays,), (jax.tree.map(jnp.ones_like, arrays),))

    gradients, products = first_and_second((numpy_params(score, 6, 6), tokens, tokens))
    for leaf in jax.tree.leaves((gradients, products)):
        assert np.isfinite(leaf).all()
    assert all(map(np.any, gradients[1:]))


@pytest.mark.parametrize("name", ["hyperbolic", "yat"])
def test_near_tokens_keep_their_digits(name):
    """Where sqrt(1 + |q|^2) sqrt(1 + |k|^2) - q . k is 1 in float32."""
    score, params = LITERATURE[name], {"log_beta": np.float32(0)}
    query = normal(5, 6)
    key = query + np.float32(1e-4) * normal(5, 6, seed=1)
    with jax.enable_x64(True):
        arrays = jax.tree.map(np.float64, (params, query, key))
        expected = np.diagonal(quick_jit(score)(*arrays))
    got = np.diagonal(quick_jit(score)(params, query, key))
    np.testing.assert_allclose(got, expected, rtol=2e-2)


def test_softplus_of_any_logit():
    """softplus(x) is exp(x) at its left end, which float32 cannot hold, and x at its right end."""
    logits = np.float32([[-1e4, -100, -41, -39, 50, 1e4]]).T
    got = quick_jit(Softplus())({}, logits, np.ones((1, 1), np.float32))
    expected = [-1e4, -100.0, -41.0, -39.0, np.log(50.0), np.log(1e4)]
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6)
