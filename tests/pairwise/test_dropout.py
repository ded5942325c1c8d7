"""Dropout: a function of (rng, positions) alone; its statistics; its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, DK, DV, S, T, quick_jit
from finite_differences import check_derivatives

from attention_jax import attention, padding_mask
from attention_jax.pairwise.dropout import drop, drop_features, keep_mask

RNG = jax.random.key(13)


jitted_keep_mask = jax.jit(keep_mask, static_argnums=1)
jitted_drop_features = jax.jit(drop_features, static_argnums=2)


def keep(rate=0.3, rows=None, columns=None, rng=RNG):
    rows = np.arange(257) if rows is None else rows
    columns = np.arange(509) if columns is None else columns
    return np.asarray(jitted_keep_mask(rng, rate, rows, columns))


def test_a_tile_is_the_block_of_the_whole():
    whole = keep()
    rows, columns = np.array([3, 0, 200]), np.arange(101, 509)
    np.testing.assert_array_equal(keep(rows=rows, columns=columns), whole[rows][:, columns])
    np.testing.assert_array_equal(
        keep(rows=np.array([7]), columns=np.array([11]))[0, 0], whole[7, 11]
    )


def test_rate_rows_columns_and_neighbours_are_independent():
    table = keep(rate=0.3)
    n = table.size
    assert abs(table.mean() - 0.7) < 4 * np.sqrt(0.21 / n)
    # Each row's and each column's mean lies within five standard deviations ...
    for axis in (0, 1):
        spread = np.sqrt(0.21 / table.shape[axis])
        means = table.mean(axis)
        assert np.abs(means - 0.7).max() < 5 * spread
        # ... and they scatter as much as independent draws do, not more and not less.
        assert 0.8 < means.std() / spread < 1.2
    # Correlations, also of a 2 x 2 block's product, which a sum of two hashes could have.
    x = (table - 0.7) / np.sqrt(0.21)
    for product in (
        x[1:] * x[:-1],
        x[:, 1:] * x[:, :-1],
        x[1:, 1:] * x[:-1, :-1],
        x[1:, :-1] * x[:-1, 1:],
        x[1:, 1:] * x[:-1, :-1] * x[1:, :-1] * x[:-1, 1:],
    ):
        assert abs(product.mean()) < 4 / np.sqrt(product.size)


def test_another_rng_or_another_rate():
    assert 0.4 < (keep(0.5) == keep(0.5, rng=jax.random.key(14))).mean() < 0.6
    assert keep(0.0).all()
    assert keep(1 - 2**-24).mean() < 1e-4
    # A higher rate drops what a lower one drops, and more.
    assert not (keep(0.6) & ~keep(0.3)).any()


def test_drop_by_hand():
    weights, kept = np.float32([0.5, 0.3, 0.2]), np.array([True, False, True])
    np.testing.assert_allclose(drop(weights, kept, 0.75), [2.0, 0.0, 0.8], rtol=1e-6)


# --- of features ---


def features(*shape, dtype=np.float32):
    return np.random.default_rng(3).normal(size=shape).astype(dtype)


def test_features_are_dropped_row_by_row():
    x = features(2, 3, 11)
    kept = keep(0.3, rows=np.arange(6), columns=np.arange(11)).reshape(x.shape)
    expected = np.where(kept, np.float64(x) / 0.7, 0)
    dropped = np.asarray(jitted_drop_features(x, RNG, 0.3))
    for result in (dropped, drop_features(x, RNG, 0.3)):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_array_equal(jitted_drop_features(x, RNG, 0.3), dropped)
    np.testing.assert_array_equal(jitted_drop_features(x[0, 0], RNG, 0.3), dropped[0, 0])
    assert np.any(np.asarray(jitted_drop_features(x, jax.random.key(14), 0.3)) != dropped)
    narrow = np.asarray(jitted_drop_features(x.astype(jnp.bfloat16), RNG, 0.3))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), expected, rtol=2**-7)


def test_features_without_an_rng_or_a_rate_are_as_they_are():
    x = jnp.asarray(features(3, 5))
    assert drop_features(x, None, 0.3) is x
    assert drop_features(x, RNG, 0) is x
    assert jitted_drop_features(x[:0], RNG, 0.3).shape == (0, 5)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_features_keep_their_expectation(rate):
    samples, shape, few = 2000, (127, 131), features(127, 131)[:3, :7]

    @jax.jit
    def run(rng):
        mean = jax.vmap(lambda rng: drop_features(few, rng, rate))(jax.random.split(rng, samples))
        return drop_features(np.ones(shape, np.float32), rng, rate), mean.mean(0)

    dropped, mean = map(np.asarray, run(RNG))
    assert set(np.unique(dropped)) == {0, np.float32(1) / np.float32(1 - rate)}
    kept = dropped != 0
    assert abs(kept.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / kept.size)
    # No two rows, and no two columns, are dropped alike.
    for table in (kept, kept.T):
        assert len(np.unique(table, axis=0)) == len(table)
    # Each feature by itself, over keys.
    deviation = np.abs(few) * np.sqrt(rate / (1 - rate) / samples)
    assert np.all(np.abs(mean - few) < 4.5 * deviation)


def test_the_gradient_of_dropped_features_is_the_mask():
    x, direction = features(3, 5, 7), np.cos(features(3, 5, 7))

    @jax.jit
    def pulled_back(x, direction):
        return jax.vjp(lambda x: drop_features(x, RNG, 0.4), x)[1](direction)[0]

    kept = np.asarray(jitted_drop_features(np.ones_like(x), RNG, 0.4)) != 0
    expected = np.where(kept, np.float64(direction) / 0.6, 0)
    np.testing.assert_allclose(pulled_back(x, direction), expected, rtol=1e-6)
    assert 0 < kept.sum() < kept.size


# --- in attention ---

every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
tiled_and_slow_reference = pytest.mark.parametrize(
    "implementation", ["tiled", pytest.param("reference", marks=pytest.mark.slow)]
)


def arrays(dtype=np.float32, batch=()):
    rng = np.random.default_rng(2)
    shapes = ((T, DK), (S, DK), (S, DV))
    return [rng.normal(size=(*batch, *shape)).astype(dtype) for shape in shapes]


def weights_without_dropout():
    query, key, _ = arrays()
    logits = np.float64(query) @ np.float64(key).T / np.sqrt(DK)
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


@every_implementation
def test_output_is_the_kept_weights_times_the_values(implementation):
    query, key, value = arrays()
    output, statistics = attention(
        query,
        key,
        value,
        dropout_rate=0.4,
        dropout_rng=RNG,
        implementation=implementation,
        return_statistics=True,
    )
    with jax.enable_x64(True):
        seed = jax.random.split(RNG, ())  # as the batching does
        kept = keep(0.4, np.arange(T), np.arange(S), rng=seed)
    weights = weights_without_dropout()
    np.testing.assert_allclose(output, (weights * kept / 0.6) @ np.float64(value), atol=3e-6)
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(  # of the weights before dropout
        statistics.entropy, -(weights * np.log(weights)).sum(1), rtol=1e-5
    )


@tiled_and_slow_reference
def test_same_rng_same_result_and_examples_differ(implementation):
    query, key, value = (np.broadcast_to(x[:1], x.shape) for x in arrays(batch=(3,)))

    def run(rng):
        return attention(
            query, key, value, dropout_rate=0.5, dropout_rng=rng, implementation=implementation
        )

    jitted = quick_jit(run)
    first = np.asarray(run(RNG))
    np.testing.assert_array_equal(first, run(RNG))
    np.testing.assert_allclose(first, jitted(RNG), atol=2e-6)
    assert not np.array_equal(first, run(jax.random.key(14)))
    assert not np.array_equal(first[0], first[1])  # the same tokens, dropped independently
    raw = jax.random.key_data(RNG)
    np.testing.assert_array_equal(first, run(raw))
    np.testing.assert_allclose(first, jitted(raw), atol=2e-6)
    np.testing.assert_array_equal(first, run(np.asarray(raw)))
    rngs = jax.random.split(RNG, 2)
    mapped = np.asarray(quick_jit(jax.vmap(run))(rngs))
    for number, rng in enumerate(rngs):
        np.testing.assert_allclose(mapped[number], run(rng), atol=1e-6)


@every_implementation
def test_expectation_is_attention_without_dropout(implementation):
    query, key, value = arrays()
    samples = 4000

    def run(rng):
        return attention(
            query, key, value, dropout_rate=0.3, dropout_rng=rng, implementation=implementation
        )

    outputs = np.asarray(quick_jit(jax.vmap(run))(jax.random.split(RNG, samples)))
    weights = weights_without_dropout()
    error = np.abs(outputs.mean(0) - weights @ np.float64(value))
    assert (error < 5 * outputs.std(0) / np.sqrt(samples)).all()
    # Var(drop(w)) = w^2 rate / (1 - rate), independently for each pair
    expected = np.sqrt(weights**2 @ np.float64(value) ** 2 * 0.3 / 0.7)
    np.testing.assert_allclose(outputs.std(0), expected, rtol=0.1)


@tiled_and_slow_reference
def test_gradient_with_the_rng_held(implementation):
    attend = functools.partial(
        attention,
        mask=padding_mask(np.array(4)),
        dropout_rate=0.4,
        dropout_rng=RNG,
        implementation=implementation,
    )
    with jax.enable_x64(True):
        check_derivatives(attend, *arrays(np.float64), forward=implementation == "reference")
