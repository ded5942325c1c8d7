"""Inputs for the tests of `capture`, and attention weights in NumPy."""

import jax.numpy as jnp
import numpy as np

B, T, S, D, DV = 2, 5, 7, 3, 2


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def tokens():
    """query [B, T, D], and key [S, D] and value [S, DV], which all examples share."""
    return normal(0, B, T, D), normal(1, S, D), normal(2, S, DV)


def numpy_softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def numpy_weights(query, key):
    """The weights of scaled dot without a mask."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    return numpy_softmax(query @ np.swapaxes(key, -1, -2) / np.sqrt(key.shape[-1]))


def close(got, expected, tolerance=1e-12):
    assert got.shape == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def only(captured):
    """The single attention of a captured function."""
    assert list(captured.attentions) == ["attention"]
    return captured.attentions["attention"]
