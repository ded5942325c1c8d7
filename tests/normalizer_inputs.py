"""Small inputs for the tests of normalisers: one example with a mask and a row without keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj

T, S, D = 5, 11, 3
BLOCKS = aj.BlockSizes(2, 4)
RNG = np.random.default_rng(2)
QUERY, KEY, VALUE = (RNG.normal(size=(n, D)) for n in (T, S, S))
TABLE = RNG.random((T, S)) < 0.6
TABLE[3] = False


def arrays(dtype=jnp.float32):
    """Query, key and value."""
    return tuple(jnp.asarray(array, dtype) for array in (QUERY, KEY, VALUE))


def params_of(normalizer):
    """Parameters of a normaliser that are not their initial values."""
    return jax.tree.map(lambda leaf: leaf + 0.25, normalizer.init(jax.random.key(0)))
