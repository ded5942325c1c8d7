"""Attention rollout against loops over positions in NumPy."""

import numpy as np
import pytest
from conformance import quick_jit

from attention_jax import analysis

# Compiled as one program each.
attention_rollout = quick_jit(
    analysis.attention_rollout, static_argnames=("residual", "head_reduction", "return_layers")
)
cross_rollout = quick_jit(analysis.cross_rollout, static_argnames="head_reduction")

L, B, N, T, S = 3, 2, 5, 7, 11


def rows(*shape, seed=0):
    """Rows that sum to 1."""
    weights = np.random.default_rng(seed).exponential(size=shape)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def by_hand(weights, residual=0.5, of_heads=np.mean):
    """[L, N, T, T] -> each layer's rollout [L, T, T], an entry at a time."""
    rollout, layers = np.eye(weights.shape[-1]), []
    for layer in weights.astype(np.float64):
        size = len(rollout)
        mixture = np.zeros((size, size))
        for i in range(size):
            row = np.array([of_heads(layer[:, i, j]) for j in range(size)])
            if of_heads is np.max and row.sum():
                row /= row.sum()
            row *= 1 - residual
            row[i] += residual
            mixture[i] = row / row.sum() if row.sum() else 0
        rollout = np.array(
            [[sum(mixture[i] * rollout[:, j]) for j in range(size)] for i in range(size)]
        )
        layers.append(rollout)
    return np.array(layers)


@pytest.mark.parametrize(("reduction", "residual"), [("mean", 0), ("max", 0.7)])
def test_the_loop(reduction, residual):
    weights = rows(L, B, N, T, T)
    options = {"residual": residual, "head_reduction": reduction}
    layers = np.asarray(attention_rollout(weights, return_layers=True, **options))
    assert layers.shape == (L, B, T, T)
    for b in range(B):
        expected = by_hand(weights[:, b], residual, getattr(np, reduction))
        np.testing.assert_allclose(layers[:, b], expected, atol=1e-6)
    np.testing.assert_allclose(np.sum(layers, -1), np.ones((L, B, T)), atol=1e-6)
    np.testing.assert_array_equal(attention_rollout(weights, **options), layers[-1])
    listed = attention_rollout(list(weights), **options)
    np.testing.assert_array_equal(listed, layers[-1])


def test_rows_without_keys_keep_their_residual():
    weights = rows(L, N, T, T)
    weights[:, :, 3] = 0
    for reduction in ("mean", "max"):
        rollout = attention_rollout(weights, head_reduction=reduction)
        np.testing.assert_allclose(rollout[3], np.eye(T)[3], atol=1e-6)
        np.testing.assert_allclose(np.sum(rollout, -1), np.ones(T), atol=1e-6)
        # Nothing is left of it without a residual, and nobody gets anything from it.
        assert not np.any(attention_rollout(weights, residual=0, head_reduction=reduction)[3])
    # Padding that nobody attends to, and that attends to nothing, brings nothing to others.
    weights = rows(L, N, T, T)
    weights[..., 4:, :] = 0
    weights[..., 4:] = 0
    weights[..., :4, :4] = rows(L, N, 4, 4)
    rollout = attention_rollout(weights)
    np.testing.assert_allclose(rollout[:4, :4], attention_rollout(weights[..., :4, :4]), atol=1e-6)
    np.testing.assert_array_equal(rollout[:4, 4:], np.zeros((4, T - 4)))


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_cross_rollout(reduction):
    encoder = rows(B, S, S)
    weights = rows(B, N, T, S, seed=2)
    weights[1, :, 2] = 0
    rollout = np.asarray(cross_rollout(weights, encoder, head_reduction=reduction))
    for b, i, j in np.ndindex(B, T, S):
        heads = getattr(np, reduction)(weights[b, :, i], axis=0)
        if reduction == "max" and heads.sum():
            heads = heads / heads.sum()
        expected = sum(heads[m] * encoder[b, m, j] for m in range(S))
        np.testing.assert_allclose(rollout[b, i, j], expected, atol=1e-6)
    sums = np.ones((B, T))
    sums[1, 2] = 0
    np.testing.assert_allclose(np.sum(rollout, -1), sums, atol=1e-6)
