"""Biases against loops over pairs, in every implementation, and their gradients in float64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conformance import ALL_IMPLEMENTATIONS, TILE, assert_close, quick_jit

import attention_jax as aj
from attention_jax.pairwise.position_functions import array_field, same_rank

B, N, T, S, D = 2, 3, 5, 7, 4


@aj.bias_dataclass
class Logarithmic(aj.Bias):
    """A user's own: b_ij = -rate log(1 + |j - i|), of queries that stand `first` positions later"""

    first: jax.Array = array_field()
    rate: jax.Array = array_field()

    def values(self, query_positions, key_positions):
        queries = jnp.add(*same_rank(self.first[..., None, None], query_positions[:, None]))
        distance = jnp.subtract(*same_rank(key_positions[None, :], queries))
        distance = jnp.abs(distance).astype(self.rate.dtype)
        return -self.rate[..., None, None] * jnp.log1p(distance)


normal = functools.partial(oracles.normal, dtype=float)


def t5_bucket(distance, buckets, max_distance, bidirectional):
    """One distance at a time, in Python floats."""
    side = buckets // 2 if bidirectional else buckets
    offset = side if bidirectional and distance > 0 else 0
    size = abs(distance) if bidirectional else max(-distance, 0)
    exact = side // 2
    if size < exact:
        return offset + size
    wide = math.log(size / exact) / math.log(max_distance / exact) * (side - exact)
    return offset + min(exact + int(wide + 1e-6), side - 1)


# Each with one set of arrays for every head, and its rule for one pair.
CASES = {
    "alibi": (lambda arrays: aj.alibi_bias(arrays), (N,), lambda a, n, i, j: -a[n] * abs(i - j)),
    "relative": (
        lambda arrays: aj.relative_bias(arrays),
        (N, 5),
        lambda a, n, i, j: a[n][min(max(j - i, -2), 2) + 2],
    ),
    "t5": (
        lambda arrays: aj.t5_bias(arrays, max_distance=6),
        (N, 6),
        lambda a, n, i, j: a[n][t5_bucket(j - i, 6, 6, True)],
    ),
    "t5_causal": (
        lambda arrays: aj.t5_bias(arrays, max_distance=6, bidirectional=False),
        (N, 4),
        lambda a, n, i, j: a[n][t5_bucket(j - i, 4, 6, False)],
    ),
    "forget": (  # the sum ends with the gates
        lambda arrays: aj.forgetting_bias(arrays),
        (N, T),
        lambda a, n, i, j: a[n, : i + 1].sum() - a[n, : j + 1].sum(),
    ),
    "own": (
        lambda arrays: Logarithmic(np.array([0, 1, 3]), arrays),
        (N,),
        lambda a, n, i, j: -a[n] * math.log1p(abs(j - i - (0, 1, 3)[n])),
    ),
    "sum": (
        lambda arrays: normal(B, 1, T, S) + aj.alibi_bias(arrays) + normal(N, 1, S),
        (N,),
        lambda a, n, i, j: -a[n] * abs(i - j) + normal(N, 1, S)[n, 0, j],
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def table_of(name, arrays):
    """[B, N, T, S], pair by pair."""
    rule = CASES[name][2]
    pairs = [[[rule(arrays, n, i, j) for j in range(S)] for i in range(T)] for n in range(N)]
    table = np.broadcast_to(np.array(pairs), (B, N, T, S))
    return table + normal(B, 1, T, S) if name == "sum" else table


@functools.cache
def loss_and_gradients(name, implementation):
    """Returns a compiled function of (query, arrays of the bias, or its table if name is None)."""
    key, value = normal(B, N, S, D), normal(B, N, S, D, seed=1)

    def loss(query, arrays):
        output, statistics = aj.attention(
            query, key, value, bias=arrays if name is None else CASES[name][0](arrays),
            mask=aj.padding_mask(np.array([[S], [4]])) & aj.causal_mask(2),
            implementation=implementation, block_sizes=TILE, return_statistics=True,
        )  # fmt: skip
        return jnp.sum(jnp.sin(output)) + jnp.sum(statistics.entropy**2)

    return quick_jit(jax.value_and_grad(loss, (0, 1)))


# In tiles "t5_causal" is like "t5", and the two tests below have the others and sums of them.
SLOW = {(name, "tiled") for name in ("t5_causal", "alibi", "relative", "sum")}
SLOW |= {("forget", "reference")}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in itertools.product(CASES, ALL_IMPLEMENTATIONS)
    ],
)
def test_attention_and_its_gradients_are_those_of_a_stored_table(name, implementation):
    arrays, query = normal(*CASES[name][1]), normal(B, N, T, D)
    with jax.enable_x64(True):
        got, (dquery, darrays) = loss_and_gradients(name, implementation)(query, arrays)
        stored = loss_and_gradients(None, "reference")
        expected, (dquery_stored, dtable) = stored(query, table_of(name, arrays))
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert_close("query", dquery, np.asarray(dquery_stored), 1e-11)
    # Each rule is linear in its arrays.
    zero = table_of(name, np.zeros(arrays.shape))
    units = np.eye(arrays.size).reshape(-1, *arrays.shape)
    dtable = np.asarray(dtable)
    expected = [np.sum(dtable * (table_of(name, unit) - zero)) for unit in units]
    assert_close("arrays", darrays, np.reshape(expected, arrays.shape), 1e-11)
    assert np.all(np.asarray(darrays) != 0) or name in ("forget", "t5", "t5_causal")


def test_slopes_for_any_number_of_heads():
    np.testing.assert_allclose(aj.alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    # 12 heads: those of 8, then every second one of 16.
    expected = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n / 2) for n in (1, 3, 5, 7)]
    np.testing.assert_allclose(aj.alibi_slopes(12), expected)
