"""Where walks stop, against a triple loop in float64 and a walk by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from finite_differences import check_derivatives
from walk_cases import numpy_walk, numpy_weights, probabilities

from attention_jax.functional.monotonic_walks import (
    hard_monotonic_positions,
    hard_monotonic_weights,
    monotonic_weights,
)

B, T, S = 2, 5, 7
# Outside of `jit` every operation is a program of its own.
jitted_weights = quick_jit(monotonic_weights)
jitted_hard_weights = quick_jit(hard_monotonic_weights)
jitted_hard_positions = quick_jit(hard_monotonic_positions)


# --- weights from probabilities ---


@pytest.mark.parametrize("with_initial", [False, True])
def test_weights_are_the_papers_sum(with_initial):
    p = probabilities(B, 3, T, S)
    initial = probabilities(3, S, seed=1) / S if with_initial else None
    weights = jitted_weights(p, initial)
    assert weights.shape == p.shape
    assert weights.dtype == jnp.float32
    weights = np.asarray(weights)
    for b, n in np.ndindex(B, 3):
        expected = numpy_weights(p[b, n], None if initial is None else initial[n])
        np.testing.assert_allclose(weights[b, n], expected, atol=1e-6)
    sums = np.sum(np.asarray(weights, np.float64), -1)
    assert np.all(np.diff(sums, axis=-1, prepend=1) <= 1e-6)  # what passes the last key is lost


def test_saturated_and_long_stays_exact():
    """Here the paper's cumulative product underflows: 211 keys, p of 0, 1 and all between."""
    p = probabilities(T, 211) ** 2
    p[:, 50:150] = 0
    p[:, 151:160] = 1
    p[1, :40] = 1 - 1e-6
    p[2] = 0.75
    np.testing.assert_allclose(jitted_weights(p), numpy_weights(p), atol=2e-6)


def test_gradients_to_second_order():
    p = np.random.default_rng(2).uniform(0.1, 0.9, size=(3, 5))
    initial = np.full(5, 0.2)
    with jax.enable_x64(True):
        check_derivatives(monotonic_weights, p, initial)


def test_gradients_are_finite_and_right_at_0_and_1():
    p = np.array([[0, 1, 0.5], [0, 0, 0], [1, 1, 1]], np.float64)
    with jax.enable_x64(True):
        cotangent = np.random.default_rng(0).normal(size=p.shape)

        def loss(p):
            return jnp.sum(monotonic_weights(p) * cotangent)

        gradient = quick_jit(jax.grad(loss))(p)
    # Weights are polynomials in p: differences work beyond [0, 1] too.
    expected = np.zeros_like(p)
    for index in np.ndindex(p.shape):
        step = np.zeros_like(p)
        step[index] = 1e-6
        difference = numpy_weights(p + step) - numpy_weights(p - step)
        expected[index] = np.sum(difference * cotangent) / 2e-6
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_computed_in_float32(dtype):
    p = probabilities(T, S).astype(dtype)
    weights, wide = jitted_weights(p), np.asarray(jitted_weights(p.astype(np.float32)))
    np.testing.assert_array_equal(weights, wide.astype(dtype))
    assert weights.dtype == jax.eval_shape(hard_monotonic_weights, p).dtype == dtype


def test_no_queries_and_no_keys():
    for shape in ((0, S), (T, 0), (B, 0, 0)):
        p = np.zeros(shape, np.float32)
        assert jitted_weights(p).shape == shape
        assert jitted_hard_weights(p).shape == shape


# --- the hard form ---


def test_first_choice_at_or_after_the_last_position():
    p = np.float32([[0, 0, 0, 1, 1, 0, 1, 1]])
    assert [jitted_hard_positions(p, start).tolist() for start in (0, 4, 5)] == [[3], [4], [6]]
    assert jitted_hard_weights(p).tolist() == [[0, 0, 0, 1, 0, 0, 0, 0]]


def test_walks_against_a_loop_and_a_half_is_chosen():
    p = probabilities(3, T, S, seed=7)
    p[:, :, 2] = 0.5
    start = np.array([0, 2, 5])
    positions = np.asarray(hard_monotonic_positions(p, start))
    assert positions.dtype == np.int32
    for example, first, found in zip(p, start, positions, strict=True):
        assert found.tolist() == numpy_walk(example >= 0.5, first)
    np.testing.assert_array_equal(jitted_hard_positions(p >= 0.5, start), positions)
    for transformed in (jitted_hard_positions, quick_jit(jax.vmap(hard_monotonic_positions))):
        np.testing.assert_array_equal(transformed(p, start), positions)


def test_a_walk_that_passes_the_last_key_ends():
    p = np.float32([[0, 1, 0], [0, 0, 0], [1, 1, 1]])
    assert jitted_hard_weights(p).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert jitted_hard_positions(p, 3).tolist() == [3, 3, 3]


# --- the check of the range ---


@pytest.mark.parametrize(
    "walk", [monotonic_weights, hard_monotonic_positions, hard_monotonic_weights]
)
def test_rounding_nan_and_traced_probabilities_pass(walk):
    p = probabilities(B, T, S)
    expected = walk(p)
    p[0, 0, 0] = 1 + 1e-7  # rounding
    walk(p)
    # NaN reaches no key before its own and no query before its own.
    p = probabilities(B, T, S)
    p[:, 3:, 4:] = np.nan
    with_nan = walk(p)
    if walk is not hard_monotonic_positions:
        expected, with_nan = expected[..., :4], with_nan[..., :4]
    np.testing.assert_allclose(with_nan[:, :3], expected[:, :3], atol=1e-7)
    # What is traced has no numbers yet.
    assert jax.eval_shape(jax.jit(walk), p + 2).shape[0] == B
    assert jax.vmap(walk)(p + 2).shape[0] == B
