"""Random arrays and a softmax in NumPy, from which tests compute what they expect."""

import jax
import numpy as np


def normal(*shape, seed=0, dtype=np.float32):
    """Independent standard normal numbers, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def softmax(logits, allowed=True):
    """The softmax of the allowed logits of each row, in float64; 0 in a row without any."""
    logits = np.where(allowed, np.float64(logits), -np.inf)
    largest = logits.max(-1, keepdims=True, initial=-1e300)
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def assert_leaves_close(got, expected, **tolerances):
    """Equal structures, and leaves that are close."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(one, other, **tolerances)
