"""The loss against a loop over real tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.training.losses import cross_entropy, masked_mean, real_tokens

B, T, V = 3, 5, 7
LENGTHS = np.array([5, 0, 2])


def data():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(B, T, V)).astype(np.float32)
    return logits, rng.integers(0, V, size=(B, T)).astype(np.int32)


def looped(logits, targets, lengths):
    logits, total, count = logits.astype(np.float64), 0.0, 0
    for row in range(len(lengths)):
        for position in range(lengths[row]):
            at = logits[row, position]
            total += np.log(np.sum(np.exp(at))) - at[targets[row, position]]
            count += 1
    return total / max(count, 1)


def test_real_tokens():
    found = real_tokens(jnp.array(LENGTHS), T)
    assert found.tolist() == [[True] * 5, [False] * 5, [True, True, False, False, False]]


def test_mean_over_real_tokens():
    logits, targets = data()
    loss = jax.jit(cross_entropy)(logits, targets, LENGTHS)
    assert loss.shape == ()
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, looped(logits, targets, LENGTHS), rtol=1e-6)


def test_padding_counts_nowhere():
    logits, targets = data()
    padding = np.arange(T)[None, :] >= LENGTHS[:, None]
    spoiled = np.where(padding[:, :, None], np.float32(1e4), logits)
    other_targets = np.where(padding, V - 1, targets)
    gradient = jax.value_and_grad(cross_entropy)
    loss, dlogits = gradient(logits, targets, LENGTHS)
    spoiled_loss, spoiled_dlogits = gradient(spoiled, other_targets, LENGTHS)
    np.testing.assert_array_equal(loss, spoiled_loss)
    np.testing.assert_array_equal(dlogits, spoiled_dlogits)
    np.testing.assert_array_equal(np.any(dlogits != 0, axis=-1), ~padding)


def test_gradient_is_softmax_minus_one_hot_over_the_count():
    logits, targets = data()
    dlogits = jax.grad(cross_entropy)(logits, targets, LENGTHS)
    exps = np.exp(logits.astype(np.float64))
    expected = (exps / exps.sum(-1, keepdims=True) - np.eye(V)[targets]) / 7
    expected[np.arange(T)[None, :] >= LENGTHS[:, None]] = 0
    np.testing.assert_allclose(dlogits, expected, atol=1e-6)


def test_no_real_token():
    logits, targets = data()
    loss, dlogits = jax.value_and_grad(cross_entropy)(logits, targets, np.zeros(B, int))
    assert loss == 0
    np.testing.assert_array_equal(dlogits, np.zeros_like(logits))


def test_masked_mean_is_over_real_positions_and_padding_may_be_nan():
    values = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)
    expected = np.mean([values[row, i] for row in range(B) for i in range(LENGTHS[row])])
    spoiled = np.where(np.arange(T)[None, :] < LENGTHS[:, None], values, np.float32(np.nan))
    mean, gradient = jax.value_and_grad(masked_mean)(jnp.array(spoiled), jnp.array(LENGTHS))
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    real = np.arange(T)[None, :] < LENGTHS[:, None]
    np.testing.assert_allclose(gradient, real / LENGTHS.sum(), rtol=1e-6)
    assert masked_mean(jnp.array(spoiled), jnp.zeros(B, int)) == 0
    assert masked_mean(jnp.ones((B, T), jnp.bfloat16), jnp.array(LENGTHS)).dtype == jnp.bfloat16
