"""The softmax's Jacobian, its norm and vector products, against NumPy and by hand."""

import functools

import conformance as suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import normal, softmax

from attention_jax import analysis
from attention_jax.analysis import logit_scale_sweep

# Compiled as one program each.
softmax_jacobian = suite.quick_jit(analysis.softmax_jacobian)
softmax_jacobian_norm = suite.quick_jit(analysis.softmax_jacobian_norm)
softmax_vjp = suite.quick_jit(analysis.softmax_vjp)

B, T, S = 2, 5, 7


def jacobian_by_loops(row):
    return np.array([[a * ((j == k) - b) for k, b in enumerate(row)] for j, a in enumerate(row)])


# --- the Jacobian ---


def test_jacobian_against_loops():
    weights = softmax(normal(B, T, S))
    weights[1, 2] = 0  # a query without keys
    got = np.asarray(softmax_jacobian(weights.astype(np.float32)))
    assert got.shape == (B, T, S, S)
    for index in np.ndindex(B, T):
        np.testing.assert_allclose(got[index], jacobian_by_loops(weights[index]), atol=1e-7)
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


# --- over the scale of the logits: NumPy and limits ---


SCALES = np.array([0.0, 0.3, 1.0, 7.0, 1e4])  # of uniform weights, and of one key


def test_a_sweep_against_numpy():
    case, mask = suite.SCORE_CASES["general"], suite.MASK_CASES["padding"]
    inputs, allowed, doutput = (
        suite.inputs_of("general"),
        suite.allowed_table("padding"),
        suite.cotangents()["output"],
    )
    query, key = inputs["query"][:, :, None], inputs["key"][:, None, :]
    logits, seen = case.pair(inputs["params"], query, key), allowed.any(-1)
    dweights, expected = (doutput @ np.swapaxes(inputs["value"], -1, -2))[seen], []
    for scale in SCALES:
        weights = softmax(scale * logits, allowed)[seen]
        jacobian = weights[:, :, None] * (np.eye(weights.shape[-1]) - weights[:, None])
        dlogits = np.einsum("rjk,rk->rj", jacobian, dweights)
        entropy = -np.sum(weights * np.log(np.where(weights, weights, 1)), -1)
        norms = np.linalg.norm(dlogits, axis=-1), entropy, np.linalg.norm(jacobian, axis=(1, 2))
        expected.append([np.mean(each) for each in norms])
    with jax.enable_x64(True):
        dirty = suite.poisoned({**inputs, "bias": np.zeros(allowed.shape)}, allowed)
        del dirty["bias"]
        sweep = functools.partial(logit_scale_sweep, score=case.score, mask=mask.build())
        got = suite.quick_jit(sweep)(**dirty, doutput=doutput, scales=SCALES)
    np.testing.assert_allclose(np.stack(got[1:], axis=-1), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(got.scales, SCALES)


def test_a_sweep_without_keys_is_0():
    nothing = np.zeros((T, S), bool)
    tokens = normal(T, 3), normal(S, 3), normal(S, 2), normal(T, 2, seed=1)
    found = suite.quick_jit(logit_scale_sweep)(*tokens, np.float32(SCALES), mask=nothing)
    assert not any(np.any(array) for array in found[1:])
