"""The sums of a row that a kernel keeps while it goes over tiles of keys."""

import jax.numpy as jnp
import numpy as np

from attention_jax.normalizers.softmax_rows import LOWEST, SoftmaxSums


def test_tiles_one_after_another_are_one_row():
    logits = np.random.default_rng(0).normal(scale=3, size=(3, 12)).astype("f4")
    logits[0, :8] = -np.inf  # the first query has no key in the first two tiles
    logits[1] = np.sort(logits[1])  # every tile has a new largest logit
    sums = SoftmaxSums(jnp.full(3, LOWEST, jnp.float32), jnp.zeros(3), jnp.zeros(3))
    for tile in np.split(logits, 3, axis=1):
        largest = jnp.maximum(jnp.max(jnp.asarray(tile), axis=1), LOWEST)
        sums, _, _ = sums.with_tile(jnp.asarray(tile), largest)
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    products = exponentials * np.where(exponentials > 0, shifted, 0)
    np.testing.assert_allclose(sums.total, exponentials.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(sums.moment, products.sum(axis=1), rtol=1e-5)
