"""Attention rollout against products of matrices in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import normal, softmax

from attention_jax import analysis

# Compiled as one program each.
attention_rollout = quick_jit(
    analysis.attention_rollout, static_argnames=("residual", "head_reduction", "return_layers")
)
cross_rollout = quick_jit(analysis.cross_rollout, static_argnames="head_reduction")

L, B, N, T, S = 3, 2, 5, 7, 11


def rows(*shape, seed=0):
    """Rows that sum to 1."""
    return softmax(normal(*shape, seed=seed)).astype(np.float32)


def normalized(weights):
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def of_heads(weights, reduction):
    """[..., N, T, S] -> [..., T, S] in float64."""
    heads = getattr(np, reduction)(weights.astype(np.float64), axis=-3)
    return normalized(heads) if reduction == "max" else heads


@pytest.mark.parametrize(("reduction", "residual"), [("mean", 0), ("max", 0.7)])
def test_the_products_of_the_layers(reduction, residual):
    weights, rollout = rows(L, B, N, T, T), np.eye(T)
    options = {"residual": residual, "head_reduction": reduction}
    layers = np.asarray(attention_rollout(weights, return_layers=True, **options))
    for layer, found in zip(of_heads(weights, reduction), layers, strict=True):
        rollout = normalized((1 - residual) * layer + residual * np.eye(T)) @ rollout
        np.testing.assert_allclose(found, rollout, atol=1e-6)
    for given in (weights, list(weights)):
        np.testing.assert_array_equal(attention_rollout(given, **options), layers[-1])


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


def test_rows_that_are_no_shares_are_refused_where_their_values_are_known():
    right = rows(L, N, T, T)
    wrong = right.copy()
    wrong[1, 2, 3] *= 0.6  # as of a Gaussian
    both = (
        (analysis.attention_rollout, (wrong,)),
        (analysis.cross_rollout, (wrong[1], right[0, 0])),
    )
    for function, arguments in both:
        with pytest.raises(
            ValueError, match=r"^\w*weights must have rows that sum .*; got .* 0\.6$"
        ):
            function(*arguments)
    assert np.isfinite(attention_rollout(wrong)).all()  # under jit nothing is known
    blind = right.copy()
    blind[:, :, 2] = 0  # a row without keys is none
    np.testing.assert_allclose(analysis.attention_rollout(blind)[2], np.eye(T)[2], atol=1e-6)
    # 16 bits round weights, and a model that diverged has NaN.
    half = right.astype(jnp.bfloat16)
    np.testing.assert_allclose(analysis.attention_rollout(half), attention_rollout(half), atol=1e-6)
    wrong[1, 2, 3] = np.nan
    assert np.isnan(analysis.attention_rollout(wrong)[3]).all()
    # An array without heads needs an axis for them: otherwise its examples are the heads.
    alone = analysis.attention_rollout(right[:, :, None])
    assert alone.shape == (N, T, T)
    np.testing.assert_allclose(alone[1], attention_rollout(right[:, 1:2]), atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_cross_rollout(reduction):
    encoder = rows(B, S, S)
    weights = rows(B, N, T, S, seed=2)
    weights[1, :, 2] = 0
    rollout = cross_rollout(weights, encoder, head_reduction=reduction)
    np.testing.assert_allclose(rollout, of_heads(weights, reduction) @ encoder, atol=1e-6)
    assert not np.any(rollout[1, 2])
