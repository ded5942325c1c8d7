"""Biases against loops over pairs, in every implementation, and their gradients in float64."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conformance import ALL_IMPLEMENTATIONS, TILE, assert_close, quick_jit
from mistakes import refused
from score_cases import slow_unless
from strategies import bucket_of

import attention_jax as aj
from attention_jax.core.arrays import same_rank
from attention_jax.positions.buckets import relative_position_bucket

B, N, T, S, D = 2, 3, 5, 7, 4


@aj.bias_dataclass
class Logarithmic(aj.Bias):
    """A user's own: b_ij = -rate log(1 + |j - i|), of queries that stand `first` positions later"""

    first: jax.Array = aj.array_field()
    rate: jax.Array = aj.array_field()

    def values(self, query_positions, key_positions):
        queries = jnp.add(*same_rank(self.first[..., None, None], query_positions[:, None]))
        distance = jnp.subtract(*same_rank(key_positions[None, :], queries))
        distance = jnp.abs(distance).astype(self.rate.dtype)
        return -self.rate[..., None, None] * jnp.log1p(distance)


normal = functools.partial(oracles.normal, dtype=float)


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
        lambda a, n, i, j: a[n][bucket_of(j - i, 6, 6, True)],
    ),
    "t5_causal": (
        lambda arrays: aj.t5_bias(arrays, max_distance=6, bidirectional=False),
        (N, 4),
        lambda a, n, i, j: a[n][bucket_of(j - i, 4, 6, False)],
    ),
    "forget": (
        lambda arrays: aj.forgetting_bias(arrays),
        (N, T),
        lambda a, n, i, j: a[n, : i + 1].sum() - a[n, : j + 1].sum(),
    ),
    "own": (
        lambda arrays: Logarithmic(np.array([0, 1, 3]), arrays),
        (N,),
        lambda a, n, i, j: -a[n] * math.log1p(abs(j - i - (0, 1, 3)[n])),
    ),
}


def source_length(name):
    """Forget gates are those of one sequence."""
    return T if name == "forget" else S


def table_of(name, arrays):
    """[N, T, S], pair by pair."""
    rule, keys = CASES[name][2], range(source_length(name))
    return np.array([[[rule(arrays, n, i, j) for j in keys] for i in range(T)] for n in range(N)])


def assert_gradients_of_tables(got, dtable):
    """Compares gradients of each bias's arrays with those of the tables; rules are linear."""
    for name, darrays in got.items():
        shape = CASES[name][1]
        zero = table_of(name, np.zeros(shape))
        units = np.eye(math.prod(shape)).reshape(-1, *shape)
        dcase = dtable[..., : zero.shape[-1]]
        expected = [np.sum(dcase * (table_of(name, unit) - zero)) for unit in units]
        assert_close(name, darrays, np.reshape(expected, shape), 1e-11)


ARRAYS = {name: normal(*shape) for name, (_, shape, _) in CASES.items()}
TABLES = {name: table_of(name, arrays) for name, arrays in ARRAYS.items()}
STORED = normal(B, 1, T, S), normal(N, 1, S)


def test_a_table_and_its_gradient_are_those_of_the_rule():
    dtable = normal(N, T, S)

    @quick_jit
    def tables_and_gradients(arrays):
        def tables(arrays):
            return {
                name: CASES[name][0](arrays[name]).materialize(T, source_length(name))
                for name in CASES
            }

        got, pull_back = jax.vjp(tables, arrays)
        return got, pull_back({name: dtable[..., : source_length(name)] for name in CASES})[0]

    with jax.enable_x64(True):
        tables, gradients = tables_and_gradients(ARRAYS)
    for name, table in tables.items():
        np.testing.assert_allclose(table, TABLES[name], rtol=1e-12, atol=1e-14, err_msg=name)
    assert_gradients_of_tables(gradients, dtable)


@pytest.mark.parametrize("implementation", slow_unless(["tiled"], ALL_IMPLEMENTATIONS))
def test_a_sum_of_biases_is_its_stored_table(implementation):
    """A sum of biases and of arrays on both sides, which have other batch axes."""
    arrays = {name: ARRAYS[name] for name in ("t5", "own")}
    query, key = (normal(B, N, n, D, seed=n) for n in (T, S))
    mask = aj.causal_mask(2) & aj.padding_mask(np.array([[S], [4]]))

    def of_arrays(query, arrays):
        biases = [CASES[name][0](array) for name, array in arrays.items()]
        bias = STORED[0] + functools.reduce(operator.add, biases) + STORED[1]
        options = {"implementation": implementation, "block_sizes": TILE}
        return jnp.sum(jnp.sin(aj.attention(query, key, key, mask=mask, bias=bias, **options)))

    def of_table(query, table):
        logits = query @ key.swapaxes(-1, -2) / D**0.5 + table
        return jnp.sum(jnp.sin(aj.masked_softmax(logits, mask) @ key))

    @quick_jit
    def both(query, arrays, table):
        return (
            jax.value_and_grad(of_arrays, (0, 1))(query, arrays),
            jax.value_and_grad(of_table, (0, 1))(query, table),
        )

    with jax.enable_x64(True):
        table = sum(STORED, sum(TABLES[name] for name in arrays))
        (got, (dquery, darrays)), (expected, (dquery_stored, dtable)) = both(query, arrays, table)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert_close("query", dquery, np.asarray(dquery_stored), 1e-11)
    assert_gradients_of_tables(darrays, np.asarray(dtable))


def test_buckets_are_those_of_exact_arithmetic():
    """Also where the logarithm is a whole number, at which its floor in floats may be one less."""
    tables = [(12, 81, True), (12, 243, True), (32, 800, True), (32, 128, True)]
    for buckets in range(4, 66):
        both = buckets % 4 == 0
        exact = buckets // (4 if both else 2)
        tables.append((buckets, exact * (4, 8, 9, 10, 16, 25)[buckets % 6], both))
    distances = np.arange(-900, 901)

    def buckets_of(distances, tables=tables):
        return [
            relative_position_bucket(distances, buckets=n, max_distance=most, bidirectional=both)
            for n, most, both in tables
        ]

    jitted, eager = jax.jit(buckets_of)(distances), buckets_of(distances, tables[:20])
    for table, buckets in zip(tables, jitted, strict=True):
        expected = [bucket_of(int(distance), *table) for distance in distances]
        np.testing.assert_array_equal(buckets, expected, err_msg=str(table))
    np.testing.assert_array_equal(eager, jitted[:20])
    one_by_one = jax.vmap(lambda d: relative_position_bucket(d, buckets=12, max_distance=81))
    np.testing.assert_array_equal(one_by_one(distances), eager[0])


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_the_largest_distances_share_the_last_buckets(dtype):
    extremes = np.iinfo(dtype)
    distances = np.array([extremes.min, extremes.min + 1, extremes.max], dtype)
    buckets = relative_position_bucket(distances, buckets=8, max_distance=20)
    assert buckets.tolist() == [3, 3, 7]
    causal = relative_position_bucket(distances, buckets=8, max_distance=20, bidirectional=False)
    assert causal.tolist() == [7, 7, 0]


def test_a_table_of_examples_is_not_read_as_one_of_heads():
    """[B, T, S] for inputs [B, N, T, D] with B = N, which a mask is refused for too."""
    query, table = normal(B, B, T, D), normal(B, T, T)
    for bias in (table, aj.alibi_bias(normal(B)) + table):
        for attend in (aj.attention, aj.monotonic_attention):
            with pytest.raises(ValueError, match=r"^bias must have all 2 .* bias\[:, None\] if"):
                attend(query, query, query, bias=bias)
    logits = query @ query.swapaxes(-1, -2) / D**0.5
    for bias in (table[None], table[:, None], table[0], table[:1]):
        expected = oracles.softmax(logits + bias) @ query
        output = aj.attention(query, query, query, bias=bias)
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "slope"), [(np.float16, 2.0**-8), (jnp.bfloat16, 0.0390625)])
def test_long_distances_of_a_narrow_slope(dtype, slope):
    table = aj.alibi_bias(jnp.asarray(slope, dtype)).materialize(1, 66_001)
    np.testing.assert_allclose(table[0], -slope * np.arange(66_001), rtol=1e-6)


def test_slopes_for_any_number_of_heads():
    np.testing.assert_allclose(aj.alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    # 12 heads: those of 8, then every second one of 16.
    expected = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n / 2) for n in (1, 3, 5, 7)]
    np.testing.assert_allclose(aj.alibi_slopes(12), expected)


@aj.bias_dataclass
class Checked(aj.Bias):
    """A bias that checks and casts its array, and derives an attribute; an option has a default."""

    power: int = 1
    rate: jax.Array = aj.array_field(kw_only=True)
    first: jax.Array = aj.array_field(default=np.zeros((), np.float32))

    def __post_init__(self):
        object.__setattr__(self, "exponent", 2 * self.power)
        object.__setattr__(self, "rate", jnp.asarray(self.rate, float))
        if self.rate.ndim != 1 or (self.rate < 0).any():  # fails under `jit` too
            raise ValueError(f"rate must be positive numbers [B]; got {self.rate}")

    def values(self, i, j):
        distances = (j[None, :] - i[:, None]).astype(self.rate.dtype) - self.first
        return -self.rate[..., None, None] * distances**self.exponent


@aj.mask_dataclass
class CheckedMask(aj.Mask):
    limits: jax.Array = aj.array_field()

    def __post_init__(self):
        assert self.limits.shape == (2,)

    def allowed(self, i, j):
        return j[None] <= i[:, None] + self.limits[..., None, None]


def test_a_post_init_that_looks_at_an_array():
    """It meets no axes, placeholders or arrays of one example: JAX rebuilds the part without it."""
    x, rate = np.stack([normal(6, 8)] * 2).astype(np.float32), np.float32([0.5, 0.25])

    bias, mask = Checked(rate=rate), CheckedMask(jnp.array([0, 2]))

    @jax.jit
    @jax.value_and_grad
    def value(bias, mask):
        return sum(
            aj.attention(x, x, x, bias=bias, mask=mask, implementation=name).sum()
            for name in ("reference", "tiled")
        )

    def plain(rate):
        distances = np.subtract.outer(np.arange(6.0), np.arange(6.0))
        mask = np.stack([np.tri(6, k=k) > 0 for k in (0, 2)])
        return 2 * aj.attention(
            x, x, x, bias=-rate[:, None, None] * distances[None] ** 2, mask=mask
        )

    expected = jax.value_and_grad(lambda rate: plain(rate).sum())(rate)
    total, gradient = value(bias, mask)
    np.testing.assert_allclose(total, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient.rate, expected[1], rtol=1e-4)
    rows = jax.vmap(lambda bias, x: aj.attention(x, x, x, bias=bias), (0, 0))
    rows = rows(jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2,)), bias), x)
    np.testing.assert_allclose(rows, aj.attention(x, x, x, bias=bias), rtol=1e-4)
    leaf = object()
    assert jax.tree.unflatten(jax.tree.structure(bias), [leaf, 0]).rate is leaf
    assert jax.tree.map(lambda _: None, mask).limits is None
    refused("rate must be positive", lambda: Checked(rate=-rate))
    fields = {"__annotations__": {"a": int, "b": jax.Array}, "a": 1, "b": aj.array_field()}
    refused(r"Mine: .*array_field\(default=, kw_only=\)",
            lambda: aj.mask_dataclass(type("Mine", (aj.Mask,), fields)))  # fmt: skip
