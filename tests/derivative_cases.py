"""Inputs in float64, and a number of all results of attention, for comparing derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
from conformance import SCORE_CASES, assert_close, named

T, S, DV = 5, 7, 2
RNG = np.random.default_rng(12)
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(4)}


def normal(*shape):
    """Returns float64 numbers, for use under `enable_x64`."""
    return RNG.normal(size=shape)


def point_of(score_name, target=T, source=S):
    case = SCORE_CASES[score_name]
    params = case.score.init(jax.random.key(1), case.query_dim, 11)
    return {
        "query": normal(target, case.query_dim),
        "key": normal(source, 11),
        "value": normal(source, DV),
        "bias": normal(target, source),
        "params": jax.tree.map(np.float64, params),
    }


def numbers_of(output_and_statistics):
    """Returns one number that depends on every entry of the results in a different way."""
    output, statistics = output_and_statistics
    finite = jnp.where(jnp.isfinite(statistics.logsumexp), statistics.logsumexp, 0)
    wide = statistics.entropy.dtype
    total = jnp.zeros((), wide)
    for array in (output, finite, statistics.entropy):
        weights = np.cos(np.arange(array.size)).reshape(array.shape).astype(array.dtype)
        total = total + (jnp.sin(array) * weights).sum().astype(wide)
    return total


def agree(got, expected, tolerance=1e-11):
    got, expected = named(got), named(expected)
    assert got.keys() == expected.keys()
    for name, array in got.items():
        assert_close(name, array, np.asarray(expected[name]).astype(np.float64), tolerance)
        assert np.any(array), name
