"""Monotonic attention against a loop in float64, a walk by hand, and itself step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from numpy_model import PAIRS
from score_cases import numpy_params
from walk_cases import numpy_walk, numpy_weights

from attention_jax import get_score, padding_mask
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.scores import SCORES

B, T, S, DV = 2, 5, 7, 13
SCORED = [name for name in sorted(SCORES) if name in PAIRS]


def arrays(score, seed=3):
    """(query, key, value, params) for one score."""
    query_dim, key_dim = (11, 11) if get_score(score).needs_equal_dims else (3, 11)
    rng = np.random.default_rng(seed)
    shapes = ((B, T, query_dim), (B, S, key_dim), (B, S, DV))
    tokens = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return *tokens, numpy_params(get_score(score), query_dim, key_dim)


def numpy_attention(score, query, key, value, params, offset=0.0, mask=None):
    """Output and weights in float64 from the score's formula for each pair."""
    query, key, params = jax.tree.map(np.float64, (query, key, params))
    logits = PAIRS[score](params, query[:, :, None], key[:, None])
    p = 1 / (1 + np.exp(-(logits + offset)))
    if mask is not None:
        p = np.where(mask, p, 0)
    weights = np.stack([numpy_weights(example) for example in p])
    return weights @ np.asarray(value, np.float64), weights


# --- attention ---


@functools.cache
def jitted(score, **static):
    return quick_jit(functools.partial(monotonic_attention, score=score, **static))


@pytest.mark.parametrize("score", SCORED)
def test_attention_is_the_formula(score):
    query, key, value, params = arrays(score)
    tokens = query, key, value
    output, weights = jitted(score)(*tokens, params=params, offset=-0.5)
    expected, expected_weights = numpy_attention(score, *tokens, params, -0.5)
    np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
    np.testing.assert_allclose(output, expected, atol=5e-6)


# Cosine divides by lengths, which a masked token may lack; the others are tested slowly.
@pytest.mark.parametrize(
    "score",
    [
        name if name in ("additive", "cosine") else pytest.param(name, marks=pytest.mark.slow)
        for name in SCORED
    ],
)
def test_masks_fully_masked_rows_and_padding_that_holds_nan(score):
    query, key, value, params = arrays(score)
    mask = padding_mask(np.array([4, S]), np.array([3, T]))
    table = (np.arange(S) < np.array([4, S])[:, None, None]) & (
        np.arange(T)[:, None] < np.array([3, T])[:, None, None]
    )
    expected, expected_weights = numpy_attention(score, query, key, value, params, mask=table)
    query[0, 3:], key[0, 4:], value[0, 4:] = np.nan, np.nan, np.inf

    @quick_jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(tokens_and_params):
        *tokens, params = tokens_and_params
        attend = functools.partial(monotonic_attention, *tokens, score=score, params=params)
        output, weights = attend(mask=mask)
        hard, _ = attend(mask=mask, hard=True)
        return jnp.sum(output**2) + jnp.sum(weights**3), (output, weights, hard)

    gradients, results = jax.tree.map(np.asarray, gradient((query, key, value, params)))
    output, weights, hard = results
    np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
    np.testing.assert_allclose(output, expected, atol=5e-6)
    assert np.all(output[0, 3:] == 0)
    for leaf in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(leaf))
    assert all(np.all(d[0, n:] == 0) for d, n in zip(gradients, (3, 4, 4), strict=False))
    assert np.all(np.isfinite(hard))


@pytest.mark.parametrize("hard", [False, True])
def test_step_by_step_is_all_at_once(hard):
    query, key, value, params = arrays("additive", seed=13)
    attend = functools.partial(jitted("additive", hard=hard), params=params, offset=-0.5)
    output, weights = map(np.asarray, attend(query, key, value))
    initial = np.eye(S, dtype=np.float32)[[0] * B]
    for i in range(T):
        one_query = query[:, i : i + 1]
        one, initial = map(np.asarray, attend(one_query, key, value, initial=initial))
        initial = initial[:, 0]
        np.testing.assert_allclose(one[:, 0], output[:, i], atol=1e-6)
        np.testing.assert_allclose(initial, weights[:, i], atol=1e-6)


def test_hard_attention_gathers_values():
    query, key, value, _ = arrays("dot", seed=17)

    @quick_jit
    def run(query):
        attend = functools.partial(monotonic_attention, score="dot", hard=True)
        gradient = jax.grad(lambda query: attend(query, key, value)[0].sum())(query)
        return attend(query, key, value, offset=-1.0), gradient

    (output, weights), gradient = jax.tree.map(np.asarray, run(query))
    for b in range(B):
        for i, j in enumerate(numpy_walk(query[b] @ key[b].T >= 1)):
            expected = np.zeros(DV) if j == S else value[b, j]
            np.testing.assert_allclose(output[b, i], expected, atol=1e-6)
            assert float(weights[b, i].sum()) == (j < S)
    assert np.all(gradient == 0)


def test_the_hard_form_starts_at_the_first_key_with_weight():
    zeros = np.zeros((1, 1), np.float32)  # logits of 0: the first key that is met is chosen
    initial = np.float32([[0, 0, 0.1, 0.6], [0, 0.3, 0, 0], [0, 0, 0, 0]])
    tokens = [np.broadcast_to(zeros, (3, length, 1)) for length in (1, 4, 4)]
    _, weights = monotonic_attention(*tokens, score="dot", hard=True, initial=initial)
    assert weights[:, 0].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_noise():
    query, key, value, _ = arrays("dot")
    rng = jax.random.key(3)

    @quick_jit
    def noisy_weights(rng, scale):
        attend = functools.partial(monotonic_attention, query, key, value, score="dot")
        return attend()[1], attend(noise_rng=rng, noise_scale=scale)[1]

    plain, noisy = map(np.asarray, noisy_weights(rng, 1.0))
    np.testing.assert_array_equal(noisy, noisy_weights(rng, 1.0)[1])
    assert np.all(np.max(np.abs(noisy - plain), axis=(1, 2)) > 1e-3)  # each example has its own
    np.testing.assert_allclose(noisy_weights(rng, 0.0)[1], plain, atol=1e-7)

    # The probabilities themselves: the first query at the first key, logits 0, many examples.
    zeros = np.zeros((1009, 1, 1), np.float32)
    p = monotonic_attention(zeros, zeros, zeros, score="dot", noise_rng=rng, noise_scale=2.0)[1]
    p = np.asarray(p, np.float64)
    logits = np.log(p / (1 - p))
    assert abs(np.mean(logits)) < 0.25
    assert abs(np.std(logits) - 2) < 0.2


def test_bias_and_an_offset_for_each_head():
    query, key, value, _ = arrays("dot")
    heads = [np.stack(leaves, 1) for leaves in ([query, 2 * query, -query], [key] * 3, [value] * 3)]
    bias = np.random.default_rng(1).normal(size=(T, S)).astype(np.float32)
    offsets = np.float32([-1.0, 0.0, 0.5])
    output, weights = map(np.asarray, jitted("dot")(*heads, offset=offsets, bias=bias))
    for n in range(3):
        tokens = [leaf[:, n] for leaf in heads]
        expected = jitted("dot")(*tokens, bias=bias + offsets[n])
        np.testing.assert_allclose(output[:, n], expected[0], atol=1e-6)
        np.testing.assert_allclose(weights[:, n], expected[1], atol=1e-6)


def test_bfloat16_inputs_and_extreme_logits():
    query, key, value, _ = arrays("dot")
    narrow = [leaf.astype(jnp.bfloat16) for leaf in (query, key, value)]
    wide = jitted("dot")(*(leaf.astype(np.float32) for leaf in narrow))
    for ours, theirs in zip(jitted("dot")(*narrow), wide, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, np.asarray(theirs).astype(jnp.bfloat16))

    soft = jitted("dot")(1e4 * query, key, value)[0]
    hard = jitted("dot", hard=True)(1e4 * query, key, value)[0]
    np.testing.assert_allclose(soft, hard, atol=1e-6)
