"""The metrics against loops over real tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.training.metrics import exact_match, token_accuracy

B, T = 5, 7
LENGTHS = np.array([7, 3, 0, 1, 4])


def data(seed):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 5, size=(B, T)).astype(np.int32)
    predictions = np.where(rng.random((B, T)) < 0.2, targets + 1, targets).astype(np.int32)
    return predictions, targets


compute_accuracy, compute_exact = jax.jit(token_accuracy), jax.jit(exact_match)


@pytest.mark.parametrize("seed", range(5))
def test_against_loops(seed):
    predictions, targets = data(seed)
    right = [
        [predictions[row, i] == targets[row, i] for i in range(LENGTHS[row])] for row in range(B)
    ]
    accuracy = compute_accuracy(predictions, targets, LENGTHS)
    exact = compute_exact(predictions, targets, LENGTHS)
    assert accuracy.dtype == exact.dtype == jnp.float32
    assert float(accuracy) == pytest.approx(sum(map(sum, right)) / 15)
    assert float(exact) == pytest.approx(sum(map(all, right)) / B)


def test_padding_counts_nowhere():
    predictions, targets = data(0)
    padding = np.arange(T)[None, :] >= LENGTHS[:, None]
    for metric in (compute_accuracy, compute_exact):
        assert metric(np.where(padding, targets, targets + 1), targets, LENGTHS) == (
            0 if metric is compute_accuracy else 1 / B  # the row without real tokens
        )
        assert metric(np.where(padding, targets + 1, targets), targets, LENGTHS) == 1
        spoiled = np.where(padding, predictions + 3, predictions)
        assert metric(spoiled, targets, LENGTHS) == metric(predictions, targets, LENGTHS)


def test_no_real_token():
    predictions, targets = data(0)
    assert compute_accuracy(predictions, targets, np.zeros(B, int)) == 0
