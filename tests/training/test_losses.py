"""Losses and accuracies against float64 loops over real tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.training import metrics
from attention_jax.training.losses import cross_entropy, output_cross_entropy

B, T, V = 3, 5, 7
LENGTHS = np.array([5, 0, 2])
PADDING = np.arange(T)[None, :] >= LENGTHS[:, None]
NONE = np.zeros(B, int)


def data():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(B, T, V)).astype(np.float32)
    return logits, rng.integers(0, V, size=(B, T)).astype(np.int32)


def test_cross_entropy_and_its_gradient_are_the_formula_over_real_tokens():
    logits, targets = data()
    gradient = jax.jit(jax.value_and_grad(cross_entropy))
    loss, dlogits = gradient(logits, targets, LENGTHS)
    exps = np.exp(logits.astype(np.float64))
    weights = exps / exps.sum(-1, keepdims=True)
    nats = -np.log(np.take_along_axis(weights, targets[..., None], axis=-1)[..., 0])
    np.testing.assert_allclose(loss, nats[~PADDING].mean(), rtol=1e-6)
    expected = np.where(PADDING[..., None], 0, (weights - np.eye(V)[targets]) / 7)
    np.testing.assert_allclose(dlogits, expected, atol=1e-6)
    spoiled = np.where(PADDING[:, :, None], np.float32(1e4), logits)
    again = gradient(spoiled, np.where(PADDING, V - 1, targets), LENGTHS)
    for one, other in zip((loss, dlogits), again, strict=True):
        np.testing.assert_array_equal(one, other)
    loss, dlogits = gradient(logits, targets, NONE)
    assert loss == 0
    assert not np.any(dlogits)


def test_accuracies_are_over_real_tokens():
    targets = np.random.default_rng(3).integers(0, 5, size=(B, T)).astype(np.int32)
    predictions = np.where(PADDING, targets + 3, targets)
    accuracy, exact = jax.jit(metrics.token_accuracy), jax.jit(metrics.exact_match)
    assert accuracy(predictions, targets, LENGTHS) == exact(predictions, targets, LENGTHS) == 1
    predictions[2, 1] += 1
    assert float(accuracy(predictions, targets, LENGTHS)) == pytest.approx(6 / 7)
    assert float(exact(predictions, targets, LENGTHS)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("count", [41, 47])  # times their rounded inverse, they are less than 1
def test_a_share_is_a_quotient_of_counts(count):
    shares = jax.jit(jax.vmap(metrics.share))(np.arange(count) < np.array([[count], [7], [0]]))
    assert shares.tolist() == [1, np.float32(7 / count), 0]
    rows = np.ones((count, 2), np.int32)
    assert jax.jit(metrics.exact_match)(rows, rows, jnp.full(count, 2)) == 1
    none = metrics.share(jnp.array([True, False]), jnp.array([False, False]))
    assert (none, none.dtype) == (0, jnp.float32)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (100, 1.983972)],
)
def test_quantiles_of_students_t(freedom, quantile):
    assert metrics.student_t(freedom) == pytest.approx(quantile, abs=1e-6)


def test_means_over_seeds():
    """One number has no deviation, and a seed that diverged is left out where that is said."""
    mean, deviation = metrics.mean_and_deviation([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]])
    assert (mean.tolist(), deviation.tolist()) == ([3, 4], [math.sqrt(7), 0])
    mean, deviation = metrics.mean_and_deviation([[2.5], [3.5]])
    assert mean.tolist() == [2.5, 3.5]
    assert np.isnan(deviation).all()
    assert metrics.mean_interval([1.0, 2.0, 6.0]) == pytest.approx((3 - 6.572411, 3 + 6.572411))
    assert metrics.mean_interval([1.0, 2.0, 6.0], 0, 9) == pytest.approx((0, 9))
    assert metrics.mean_interval([100.0, 100.0], 0, 100) == (100, 100)
    assert np.isnan(
        [metrics.mean_interval([2.5]), metrics.mean_interval([1.0, 2.0, math.nan])]
    ).all()
    assert metrics.finite_mean([math.inf, 1.0, math.nan, 4.0, -math.inf]) == 2.5
    assert math.isnan(metrics.finite_mean([math.nan]))


# --- the output layer and its loss together ---

M, D, VOCABULARY = 23, 5, 17


def features_and_layer():
    """Features, kernel, bias and targets, and which tokens are real."""
    rng = np.random.default_rng(0)
    shapes = ((M, D), (D, VOCABULARY), (VOCABULARY,))
    arrays = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    real = np.full(M, True)
    real[[0, M // 2, M - 1]] = False
    return arrays, rng.integers(0, VOCABULARY, size=M).astype(np.int32), real


def by_hand(arrays, targets, real, smoothing):
    """The three sums, and the loss's gradient in features, kernel and bias."""
    features, kernel, bias = (np.asarray(array, np.float64) for array in arrays)
    sums, gradients = np.zeros(3), [np.zeros_like(array) for array in (features, kernel, bias)]
    for m in np.flatnonzero(real):
        logits = features[m] @ kernel + bias
        log_p = logits - np.log(np.sum(np.exp(logits)))
        wanted = np.full(VOCABULARY, smoothing / VOCABULARY)
        wanted[targets[m]] += 1 - smoothing
        sums += [-wanted @ log_p, -log_p[targets[m]], np.argmax(logits) == targets[m]]
        dlogits = np.exp(log_p) - wanted
        gradients[0][m] = kernel @ dlogits
        gradients[1] += np.outer(features[m], dlogits)
        gradients[2] += dlogits
    return sums, gradients


@functools.partial(jax.jit, static_argnames="smoothing")
def sums_and_gradients(arrays, targets, real, smoothing):
    def loss(arrays):
        sums = output_cross_entropy(*arrays, targets, real, label_smoothing=smoothing)
        return sums.loss, sums

    gradients, sums = jax.grad(loss, has_aux=True)(arrays)
    return sums, gradients


def test_output_cross_entropy_is_the_formula():
    smoothing, (arrays, targets, real) = 0.1, features_and_layer()
    sums, gradients = sums_and_gradients(arrays, targets, real, smoothing)
    expected, expected_gradients = by_hand(arrays, targets, real, smoothing)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    for got, gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-5)


def test_output_cross_entropy_without_a_bias_and_with_junk_in_padding():
    (features, kernel, bias), targets, real = features_and_layer()
    none = sums_and_gradients((features, kernel, np.zeros_like(bias)), targets, real, 0.1)
    features[~real], targets[~real] = np.nan, 3
    sums, (dfeatures, dkernel, _) = sums_and_gradients((features, kernel, None), targets, real, 0.1)
    np.testing.assert_allclose(sums, none[0], rtol=1e-6)
    np.testing.assert_allclose(dkernel, none[1][1], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(dfeatures)[~real] == 0)


def test_output_cross_entropy_of_extreme_logits():
    (features, kernel, bias), targets, real = features_and_layer()
    kernel = 1e4 * kernel
    sums, gradients = sums_and_gradients((features, kernel, bias), targets, real, 0.1)
    logits = np.asarray(features, np.float64) @ kernel + bias
    rows = np.flatnonzero(real)
    largest, target = logits.max(-1)[rows], logits[rows, targets[rows]]  # all but one weight is 0
    expected = np.sum(largest - 0.9 * target - 0.1 * logits.mean(-1)[rows])
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_output_cross_entropy_of_unknown_targets_is_nan_and_of_no_real_token_zero():
    arrays, targets, real = features_and_layer()
    for target in (-1, VOCABULARY):
        wrong = np.where(np.arange(M) == np.flatnonzero(real)[1], np.int32(target), targets)
        assert np.isnan(sums_and_gradients(arrays, wrong, real, 0.1)[0].loss)
    none = sums_and_gradients(arrays, targets, np.zeros_like(real), 0.1)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(none))


def test_output_cross_entropy_sums_narrow_features_in_float32():
    arrays, targets, real = features_and_layer()
    narrow = tuple(jnp.asarray(array, jnp.bfloat16) for array in arrays)
    shapes = jax.eval_shape(lambda *x: output_cross_entropy(*x, targets, real), *narrow)
    assert {leaf.dtype for leaf in shapes} == {jnp.dtype(jnp.float32)}


def test_output_cross_entropy_of_a_batch_is_that_of_its_tokens_and_copies_no_logits():
    arrays, targets, real = features_and_layer()
    rows = [(arrays[0][None], *arrays[1:]), targets[None], real[None]]
    for got, expected in zip(
        *(jax.tree.leaves(sums_and_gradients(*x, 0.1)) for x in (rows, (arrays, targets, real))),
        strict=True,
    ):
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    shapes = [(4, 16, D), (D, 5000)]
    batch = [np.ones(shape, np.float32) for shape in shapes]
    targets, real = np.ones((4, 16), np.int32), np.full((4, 16), True)
    loss = jax.grad(lambda *x: output_cross_entropy(*x, None, targets, real).loss, argnums=(0, 1))
    compiled = jax.jit(loss).lower(*batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 16 * 5000 * 4


def test_output_cross_entropy_names_a_wrong_label_smoothing():
    arrays, targets, real = features_and_layer()
    with pytest.raises(ValueError, match=r"label_smoothing must be .*; got 1"):
        output_cross_entropy(*arrays, targets, real, label_smoothing=1)
