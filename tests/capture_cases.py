"""Inputs for the tests of `capture`, and attention weights in NumPy."""

import chex
import jax.numpy as jnp
import numpy as np
import oracles
from oracles import softmax

import attention_jax as aj

B, T, S, D, DV = 2, 5, 7, 3, 2
# Query 0 may attend to no key; no query may attend to key 6 of the second example.
MASK = aj.causal_mask(-1) & aj.padding_mask(np.array([7, 6]))
ALLOWED = np.tri(T, S, -1, dtype=bool) & (np.arange(S) < np.array([7, 6])[:, None, None])


def normal(seed, *shape):
    return jnp.asarray(oracles.normal(*shape, seed=seed, dtype=float))


def tokens():
    """query [B, T, D], and key [S, D] and value [S, DV], which all examples share."""
    return normal(0, B, T, D), normal(1, S, D), normal(2, S, DV)


def numpy_weights(query, key):
    """The weights of scaled dot without a mask."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    return softmax(query @ np.swapaxes(key, -1, -2) / np.sqrt(key.shape[-1]))


def close(got, expected, tolerance=1e-12):
    chex.assert_trees_all_close(got, expected, rtol=tolerance, atol=tolerance)


def only(captured):
    """The single attention of a captured function."""
    assert list(captured.attentions) == ["attention"]
    return captured.attentions["attention"]
