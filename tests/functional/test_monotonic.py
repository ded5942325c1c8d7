"""Monotonic attention, and where its walks stop: against loops in float64, and step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from derivative_cases import check_derivatives
from numpy_model import numpy_walk, numpy_weights, probabilities
from oracles import normal

import attention_jax as aj

B, T, S, DV = 2, 5, 7, 13
# Outside of `jit` every operation is a program of its own.
jitted_weights = quick_jit(aj.monotonic_weights)


# --- weights from probabilities ---


@pytest.mark.parametrize("with_initial", [False, True])
def test_weights_are_the_papers_sum(with_initial):
    p = probabilities(B, 3, T, S)
    initial = probabilities(3, S, seed=1) / S if with_initial else None
    weights = jitted_weights(p, initial)
    assert weights.dtype == jnp.float32
    weights = np.asarray(weights)
    for b, n in np.ndindex(B, 3):
        expected = numpy_weights(p[b, n], None if initial is None else initial[n])
        np.testing.assert_allclose(weights[b, n], expected, atol=1e-6)


def test_saturated_and_long_stays_exact():
    """Here the paper's cumulative product underflows: 211 keys, p of 0, 1 and all between."""
    p = probabilities(T, 211) ** 2
    p[:, 50:150] = 0
    p[:, 151:160] = 1
    p[1, :40] = 1 - 1e-6
    p[2] = 0.75
    np.testing.assert_allclose(jitted_weights(p), numpy_weights(p), atol=2e-6)


def test_gradients_to_second_order_also_at_0_and_1():
    p = np.random.default_rng(2).uniform(0.1, 0.9, size=(3, 5))
    with jax.enable_x64(True):
        check_derivatives(aj.monotonic_weights, p, np.full(5, 0.2))
        # Weights are polynomials in p: differences work beyond [0, 1] too.
        p = np.array([[0, 1, 0.5], [0, 0, 0], [1, 1, 1]], np.float64)
        cotangent = np.random.default_rng(0).normal(size=p.shape)
        gradient = quick_jit(jax.grad(lambda p: jnp.sum(aj.monotonic_weights(p) * cotangent)))(p)
    for index in np.ndindex(p.shape):
        step = np.zeros_like(p)
        step[index] = 1e-6
        difference = numpy_weights(p + step) - numpy_weights(p - step)
        np.testing.assert_allclose(
            gradient[index], np.sum(difference * cotangent) / 2e-6, atol=1e-8
        )


def test_low_precision_is_computed_in_float32():
    for dtype in (jnp.bfloat16, jnp.float16):
        p = probabilities(T, S).astype(dtype)
        weights, wide = jitted_weights(p), np.asarray(jitted_weights(p.astype(np.float32)))
        np.testing.assert_array_equal(weights, wide.astype(dtype))
        assert weights.dtype == jax.eval_shape(aj.hard_monotonic_weights, p).dtype == dtype


# --- the hard form ---


def test_a_walk_that_passes_the_last_key_ends():
    p = np.float32([[0, 1, 0], [0, 0, 0], [1, 1, 1]])
    assert quick_jit(aj.hard_monotonic_weights)(p).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_walks_against_a_loop_and_a_half_is_chosen():
    p = probabilities(3, T, S, seed=7)
    p[:, :, 2] = 0.5
    start = np.array([0, 2, 5])
    positions = np.asarray(aj.hard_monotonic_positions(p, start))
    assert positions.dtype == np.int32
    for example, first, found in zip(p, start, positions, strict=True):
        assert found.tolist() == numpy_walk(example >= 0.5, first)
    for transformed in (aj.hard_monotonic_positions, jax.vmap(aj.hard_monotonic_positions)):
        np.testing.assert_array_equal(quick_jit(transformed)(p, start), positions)


# --- attention ---


def test_the_hard_form_starts_at_the_first_key_with_weight():
    zeros = np.zeros((1, 1), np.float32)  # logits of 0: the first key that is met is chosen
    initial = np.float32([[0, 0, 0.1, 0.6], [0, 0.3, 0, 0], [0, 0, 0, 0]])
    tokens = [np.broadcast_to(zeros, (3, length, 1)) for length in (1, 4, 4)]
    _, weights = aj.monotonic_attention(*tokens, score="dot", hard=True, initial=initial)
    assert weights[:, 0].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_a_walk_that_meets_nan_is_nan_from_there_on():
    nan = np.nan  # those of queries 0 and 1 are after and before their walks
    p = np.float32([[0, 1, 0, nan], [nan, 0, 1, 0], [0, 0, nan, 1], [0, 1, 1, 1]])
    weights = np.asarray(aj.hard_monotonic_weights(p))
    assert weights[:2].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    assert np.isnan(weights[2:]).all()
    tokens = normal(70, 3)  # more than a chunk holds
    query = np.where(np.arange(70)[:, None] == 5, np.nan, tokens)
    for hard in (True, False):
        output, last = aj.monotonic_attention(
            query, tokens, tokens, hard=hard, return_weights="last"
        )
        np.testing.assert_array_equal(np.isnan(output).any(1), np.arange(70) >= 5)
        output = aj.monotonic_attention(
            *[tokens] * 3, hard=hard, initial=last, return_weights=False
        )
        assert np.isnan(output).all()
    real = np.arange(70) < 5
    options = {"mask": aj.token_mask(np.ones(70, bool), real), "return_weights": False}
    assert not np.any(aj.monotonic_attention(query, tokens, tokens, hard=True, **options)[5:])


def test_noise():
    query, key, value = (normal(B, length, DV) for length in (T, S, S))
    rng = jax.random.key(3)

    @quick_jit
    def noisy_weights(rng, scale):
        attend = functools.partial(aj.monotonic_attention, query, key, value, score="dot")
        return attend()[1], attend(noise_rng=rng, noise_scale=scale)[1]

    plain, noisy = map(np.asarray, noisy_weights(rng, 1.0))
    assert np.all(np.max(np.abs(noisy - plain), axis=(1, 2)) > 1e-3)  # each example has its own
    np.testing.assert_allclose(noisy_weights(rng, 0.0)[1], plain, atol=1e-7)

    # The probabilities themselves: the first query at the first key, logits 0, many examples.
    zeros = np.zeros((1009, 1, 1), np.float32)
    p = aj.monotonic_attention(zeros, zeros, zeros, score="dot", noise_rng=rng, noise_scale=2.0)[1]
    p = np.asarray(p, np.float64)
    logits = np.log(p / (1 - p))
    assert abs(np.mean(logits)) < 0.25
    assert abs(np.std(logits) - 2) < 0.2
