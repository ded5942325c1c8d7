"""Statistics of attention against loops over queries and keys in float64 NumPy."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit

from attention_jax import analysis

B, T, S = 2, 5, 7


def rows(*shape, seed=0, sharpness=2.0, dtype=np.float32):
    """Returns random rows that sum to 1."""
    weights = np.exp(sharpness * np.random.default_rng(seed).normal(size=shape))
    return (weights / weights.sum(-1, keepdims=True)).astype(dtype)


WEIGHTS = rows(B, T, S)
WEIGHTS[1, 2] = 0  # a query without keys
WEIGHTS[0, 3] = np.eye(S)[4]
MASK = np.random.default_rng(1).random((B, T, S)) < 0.6
MASK[0, 0] = [False, True, *[False] * (S - 2)]  # one key
MASK[1, 4] = False  # none
MASK[1, 0] = [True, *[False] * (S - 2), True]  # two
COUNTED = np.array([[True, False, True, True, True], [False, True, True, True, True]])
ALIGNMENT = np.array([[3, 0, S, 4, 6], [-1, 2, 5, 1, 1]])  # S and -1 are out of range


def entropy_of(weights):
    weights = np.asarray(weights, np.float64)
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)


def normalized_of(weights, allowed):
    count = allowed.sum(-1)
    entropy = entropy_of(np.where(allowed, weights, 0))
    return np.where(count > 1, entropy / np.log(np.maximum(count, 2)), 0)


def divergence_of(a, b):
    """Of rows that sum to 1 or 0, from entropies: sum m log(1/m) - sum (a log(1/a) + ...) / 2."""
    return entropy_of((np.float64(a) + b) / 2) - (entropy_of(a) + entropy_of(b)) / 2


def variance_of(logits, allowed, axes):
    return np.ma.masked_array(np.float64(logits), ~allowed).var(axis=axes).filled(0)


def mean_of(values, weights, counted):
    """The mean over counted queries that have a key, and whose value is not NaN."""
    counted = counted & weights.any(-1) & ~np.isnan(values)
    return np.ma.masked_array(values, ~counted).mean(axis=-1).filled(0)


def error_and_distance(weights, alignment):
    """Of each query; NaN where its aligned key is out of range."""
    distances = np.abs(np.arange(S) - alignment[..., None])
    inside = np.where((alignment >= 0) & (alignment < S), 1, np.nan)
    error = 1 - np.sum(np.where(distances == 0, weights, 0), axis=-1, dtype=float)
    return inside * error, inside * np.sum(weights * distances, axis=-1)


# Compiled as one program each.
STATIC = {"saturation": "bound", "logit_variance": "per_row", "attention_summary": "bound"}
(
    alignment_error, attention_summary, effective_keys, expected_distance, jensen_shannon,
    logit_variance, normalized_entropy, saturation, weight_entropy,
) = (
    quick_jit(getattr(analysis, name), static_argnames=STATIC.get(name))
    for name in (
        "alignment_error", "attention_summary", "effective_keys", "expected_distance",
        "jensen_shannon", "logit_variance", "normalized_entropy", "saturation", "weight_entropy",
    )
)  # fmt: skip


def test_entropies():
    np.testing.assert_allclose(weight_entropy(WEIGHTS), entropy_of(WEIGHTS), atol=1e-6)
    keys = np.where(WEIGHTS.any(-1), np.exp(entropy_of(WEIGHTS)), 0)
    np.testing.assert_allclose(effective_keys(WEIGHTS), keys, atol=5e-6)
    expected = normalized_of(WEIGHTS, np.ones_like(MASK))
    np.testing.assert_allclose(normalized_entropy(WEIGHTS), expected, atol=1e-6)


@pytest.mark.parametrize("mask", [MASK, MASK[0], MASK[:, 1:2], MASK[0, 1]], ids=np.shape)
def test_normalized_entropy_masked(mask):
    full = np.broadcast_to(mask, (B, T, S))
    weights = np.where(full, WEIGHTS, 0)
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # What stands at masked places does not enter.
    for held in (weights, np.where(full, weights, np.nan)):
        expected = normalized_of(weights, full)
        np.testing.assert_allclose(normalized_entropy(held, mask), expected, atol=1e-6)


@pytest.mark.parametrize("counted", [None, COUNTED, COUNTED[0]])
def test_means_over_queries(counted):
    weights = rows(B, T, S, sharpness=5.0)
    weights[1, 3] = 0
    full = np.ones((B, T), bool) if counted is None else np.broadcast_to(counted, (B, T))
    saturated = mean_of((weights.max(-1) > 0.8).astype(float), weights, full)
    assert np.all((saturated > 0) & (saturated < 1))
    error, distance = (mean_of(x, weights, full) for x in error_and_distance(weights, ALIGNMENT))
    for held in (weights, np.where(full[..., None], weights, np.nan)):
        found = saturation(held, bound=0.8, rows=counted)
        np.testing.assert_allclose(found, saturated, atol=1e-6)
        found = alignment_error(held, ALIGNMENT, rows=counted)
        np.testing.assert_allclose(found, error, atol=1e-6)
        found = expected_distance(held, ALIGNMENT, rows=counted)
        np.testing.assert_allclose(found, distance, atol=1e-5)


def test_logit_variance():
    logits = np.random.default_rng(3).normal(size=(B, T, S)).astype(np.float32) * 3 + 40
    whole = logits.var(axis=(1, 2), dtype=float)
    np.testing.assert_allclose(logit_variance(logits), whole, rtol=1e-5)
    expected, by_query = (variance_of(logits, MASK, axes) for axes in ((1, 2), 2))
    for filler in (0, np.nan, np.inf):
        held = np.where(MASK, logits, filler).astype(np.float32)
        np.testing.assert_allclose(logit_variance(held, MASK), expected, rtol=1e-5)
        per_row = logit_variance(held, MASK, per_row=True)
        np.testing.assert_allclose(per_row, by_query, rtol=1e-5, atol=1e-6)
    assert by_query[1, 4] == 0  # no key
    # Minus infinity is a mask.
    masked = np.where(MASK, logits, -np.inf).astype(np.float32)
    np.testing.assert_allclose(logit_variance(masked), expected, rtol=1e-5)
    np.testing.assert_allclose(logit_variance(logits, np.zeros_like(MASK)), [0, 0])


def test_jensen_shannon():
    a, b = rows(B, T, S, seed=5), rows(B, T, S, seed=6)
    a[0, 0, 2], b[0, 1, 3] = 0, 0
    a[0, 2, 4] = b[0, 2, 4] = 0
    a[1, 0], b[1, 0] = np.eye(S)[2], np.eye(S)[5]  # nothing in common
    a[1, 1] = b[1, 1] = 0
    a[1, 2] = 0  # in one alone
    found = jensen_shannon(a, b)
    np.testing.assert_allclose(found, divergence_of(a, b), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(found[1, :3], [math.log(2), 0, math.log(2) / 2], atol=1e-7)
    np.testing.assert_array_equal(found, jensen_shannon(b, a))
    np.testing.assert_array_equal(jensen_shannon(a, a), np.zeros((B, T)))
    assert np.all((found >= 0) & (found <= math.log(2) + 1e-6))


def test_jensen_shannon_of_neighbours_is_accurate():
    # Entropies would cancel: about 1e-10 out of 1.
    a = rows(T, S, seed=7)
    b = (a * (1 + 3e-5 * np.random.default_rng(8).normal(size=(T, S)))).astype(np.float32)
    # m ((1 + d) log(1 + d) + (1 - d) log(1 - d)) / 2 = m d^2 / 2 + O(d^4), and m d = (a - b) / 2
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    expected = ((wide_a - wide_b) ** 2 / (4 * (wide_a + wide_b))).sum(-1)
    assert np.all(expected < 1e-9)
    np.testing.assert_allclose(jensen_shannon(a, b), expected, rtol=1e-5)


def test_summary():
    summary = attention_summary(WEIGHTS, mask=MASK, rows=COUNTED, alignment=ALIGNMENT, bound=0.5)
    weights = np.where(MASK & COUNTED[..., None], WEIGHTS, 0)
    error, distance = error_and_distance(weights, ALIGNMENT)
    largest = weights.max(-1)
    expected = {
        "entropy": entropy_of(weights),
        "normalized_entropy": normalized_of(weights, MASK),
        "effective_keys": np.exp(entropy_of(weights)),
        "largest_weight": largest,
        "saturation": (largest > 0.5).astype(float),
        "alignment_error": error,
        "expected_distance": distance,
    }
    assert summary._fields == (*expected,)
    for name, of_queries in expected.items():
        means = mean_of(of_queries, weights, np.ones((B, T), bool))
        np.testing.assert_allclose(getattr(summary, name), means, atol=1e-5, err_msg=name)
    plain = attention_summary(WEIGHTS)
    assert plain.alignment_error is plain.expected_distance is None
    np.testing.assert_allclose(plain.saturation, saturation(WEIGHTS))


# --- gradients: against finite differences, and finite at zeros ---


def test_two_derivatives_along_a_direction():
    """Against central differences."""
    # None so small that finite differences would make it negative.
    weights = (rows(B, T, S, dtype=np.float64) + 1 / S) / 2
    direction, step = rows(B, T, S, seed=1, dtype=np.float64), 1e-5

    def functions(weights):
        weights = jnp.where(MASK, weights, 0)  # as a mask makes them
        summary = analysis.attention_summary(weights, mask=MASK, rows=COUNTED, alignment=ALIGNMENT)
        variances = [analysis.logit_variance(weights, MASK, per_row=rows) for rows in (True, False)]
        return summary, variances, analysis.jensen_shannon(weights, weights[..., ::-1])

    def with_slopes(weights):
        return jax.jvp(functions, (weights,), (direction,))

    @quick_jit
    def both_orders(weights):
        return jax.jvp(with_slopes, (weights,), (direction,))

    with jax.enable_x64(True):
        _, got = both_orders(weights)
        after, before = (both_orders(weights + sign * step * direction)[0] for sign in (1, -1))
    after, before = jax.device_get((after, before))
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), after, before)
    chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-7)


@quick_jit
def derivatives_of_entropies(a, b):
    """The value, both gradients, and their derivatives in the direction of (a, b)."""

    def total(a, b):
        entropies = (
            analysis.weight_entropy(a) + analysis.effective_keys(a) + analysis.normalized_entropy(b)
        )
        return jnp.sum(entropies + analysis.jensen_shannon(a, b))

    gradients, products = jax.jvp(jax.grad(total, (0, 1)), (a, b), (a, b))
    return total(a, b), gradients, products  # a curvature is 1 / size, times size


@pytest.mark.parametrize("size", [0, 1e-45, 1e-38, 1.2e-38, 1e-30, 1e-20, 1e-7])
def test_small_weights_have_finite_derivatives(size):
    weights = np.array([[1, size, 0], [size, size, 0], [0.5, 0.5, size]], np.float32)
    others = np.array([[1, 0, size], [1, 0, 0], [size, size, size]], np.float32)
    pairs = [(weights, others), (others, weights), (weights, weights), (weights, weights[::-1])]
    for a, b in pairs:
        chex.assert_tree_all_finite(found := derivatives_of_entropies(a, b))
        for gradient, at in zip(found[1], (a, b), strict=True):
            assert not np.any(np.asarray(gradient)[at < np.finfo(np.float32).tiny])


def test_masked_places_and_rows_send_no_gradient():
    counted = MASK & COUNTED[..., None]
    held = np.where(counted, WEIGHTS, np.float32(np.nan))

    def total(weights):
        summary = analysis.attention_summary(weights, mask=MASK, rows=COUNTED, alignment=ALIGNMENT)
        variances = analysis.logit_variance(weights, counted)
        return sum(map(jnp.sum, summary)) + jnp.sum(variances)

    gradient = np.asarray(quick_jit(jax.grad(total))(held))
    assert np.all(np.isfinite(gradient[counted]))
    assert np.any(gradient[counted] != 0)
    assert not np.any(gradient[~counted])
