"""Attention rollout against products of matrices in NumPy."""

import numpy as np
import pytest
from conformance import quick_jit

from attention_jax import analysis

# Compiled as one program each.
attention_rollout = quick_jit(
    analysis.attention_rollout, static_argnames=("residual", "return_layers")
)
cross_rollout = quick_jit(analysis.cross_rollout)

L, B, N, T, S = 3, 2, 5, 7, 11


def rows(*shape, seed=0):
    """Rows that sum to 1."""
    weights = np.random.default_rng(seed).exponential(size=shape)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("residual", [0, 0.7])
def test_the_products_of_the_layers(residual):
    weights, rollout = rows(L, B, N, T, T), np.eye(T)
    options = {"residual": residual}
    layers = np.asarray(attention_rollout(weights, return_layers=True, **options))
    for layer, found in zip(weights.mean(2, dtype=float), layers, strict=True):
        mixture = (1 - residual) * layer + residual * np.eye(T)
        rollout = mixture / mixture.sum(-1, keepdims=True) @ rollout
        np.testing.assert_allclose(found, rollout, atol=1e-6)
    for given in (weights, list(weights)):
        np.testing.assert_array_equal(attention_rollout(given, **options), layers[-1])


def test_rows_without_keys_keep_their_residual():
    weights = rows(L, N, T, T)
    weights[:, :, 3] = 0
    rollout = attention_rollout(weights)
    np.testing.assert_allclose(rollout[3], np.eye(T)[3], atol=1e-6)
    np.testing.assert_allclose(np.sum(rollout, -1), np.ones(T), atol=1e-6)
    # Nothing is left of it without a residual, and nobody gets anything from it.
    assert not np.any(attention_rollout(weights, residual=0)[3])
    # Padding that nobody attends to, and that attends to nothing, brings nothing to others.
    weights = rows(L, N, T, T)
    weights[..., 4:, :] = 0
    weights[..., 4:] = 0
    weights[..., :4, :4] = rows(L, N, 4, 4)
    rollout = attention_rollout(weights)
    np.testing.assert_allclose(rollout[:4, :4], attention_rollout(weights[..., :4, :4]), atol=1e-6)
    np.testing.assert_array_equal(rollout[:4, 4:], np.zeros((4, T - 4)))


def test_cross_rollout():
    encoder = rows(B, S, S)
    weights = rows(B, N, T, S, seed=2)
    weights[1, :, 2] = 0
    rollout = cross_rollout(weights, encoder)
    np.testing.assert_allclose(rollout, weights.mean(1, dtype=float) @ encoder, atol=1e-6)
    assert not np.any(rollout[1, 2])
