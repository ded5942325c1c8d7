"""Dropout: a function of (rng, positions) alone; its statistics; its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, DK, DV, S, T, quick_jit
from finite_differences import check_derivatives
from oracles import normal, softmax

from attention_jax import attention, padding_mask
from attention_jax.pairwise.dropout import drop_features, keep_mask

RNG = jax.random.key(13)


jitted_keep_mask = jax.jit(keep_mask, static_argnums=1)
jitted_drop_features = jax.jit(drop_features, static_argnums=2)


def keep(rate=0.3, rows=257, columns=509, rng=RNG):
    """The mask of the first rows and columns, or of the given ones."""
    rows, columns = (np.arange(x) if isinstance(x, int) else x for x in (rows, columns))
    return np.asarray(jitted_keep_mask(rng, rate, rows, columns))


def test_a_tile_is_the_block_of_the_whole():
    rows, columns = np.array([3, 0, 200]), np.arange(101, 509)
    np.testing.assert_array_equal(keep(rows=rows, columns=columns), keep()[rows][:, columns])


def test_rate_rows_columns_and_neighbours_are_independent():
    table = keep(rate=0.3)
    assert abs(table.mean() - 0.7) < 4 * np.sqrt(0.21 / table.size)
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


# --- of features ---


def test_features_and_their_gradient_are_dropped_by_the_mask():
    x, direction = normal(2, 3, 11), normal(2, 3, 11, seed=1)
    rate = 0.4
    kept = keep(rate, 6, 11).reshape(x.shape)

    @jax.jit
    def run(x, direction):
        dropped, pull_back = jax.vjp(lambda x: drop_features(x, RNG, rate), x)
        return dropped, pull_back(direction)[0]

    for got, of in zip(run(x, direction), (x, direction), strict=True):
        np.testing.assert_allclose(got, np.where(kept, of / (1 - rate), 0), rtol=1e-6)
    narrow = jitted_drop_features(x.astype(jnp.bfloat16), RNG, rate)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        narrow.astype(np.float32), np.where(kept, x / (1 - rate), 0), rtol=2**-6
    )


# --- in attention ---

every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
tiled_and_slow_reference = pytest.mark.parametrize(
    "implementation", ["tiled", pytest.param("reference", marks=pytest.mark.slow)]
)


def arrays(dtype=np.float32):
    return normal(T, DK, dtype=dtype), normal(S, DK, dtype=dtype), normal(S, DV, dtype=dtype)


def weights_without_dropout():
    query, key, _ = arrays(float)
    return softmax(query @ key.T / np.sqrt(DK))


@every_implementation
def test_output_is_the_kept_weights_times_the_values(implementation):
    *tokens, value = arrays()
    output, statistics = attention(
        *tokens, value, dropout_rate=0.4, dropout_rng=RNG, implementation=implementation,
        return_statistics=True,
    )  # fmt: skip
    with jax.enable_x64(True):
        seed = jax.random.split(RNG, ())  # as the batching does
        kept = keep(0.4, T, S, rng=seed)
    weights = weights_without_dropout()
    np.testing.assert_allclose(output, (weights * kept / 0.6) @ np.float64(value), atol=3e-6)
    np.testing.assert_allclose(  # of the weights before dropout
        statistics.entropy, -(weights * np.log(weights)).sum(1), rtol=1e-5
    )


@tiled_and_slow_reference
def test_same_rng_same_result_and_examples_differ(implementation):
    tokens = [np.stack([x] * 3) for x in arrays()]

    def run(rng):
        return attention(
            *tokens, dropout_rate=0.5, dropout_rng=rng, implementation=implementation
        )  # fmt: skip

    jitted = quick_jit(run)
    first = np.asarray(run(RNG))
    np.testing.assert_allclose(first, jitted(RNG), atol=2e-6)
    assert not np.array_equal(first, run(jax.random.key(14)))
    assert not np.array_equal(first[0], first[1])  # the same tokens, dropped independently
    raw = jax.random.key_data(RNG)
    np.testing.assert_array_equal(first, run(raw))
    np.testing.assert_array_equal(first, run(np.asarray(raw)))
    rngs = jax.random.split(RNG, 2)
    mapped = np.asarray(quick_jit(jax.vmap(run))(rngs))
    for number, rng in enumerate(rngs):
        np.testing.assert_allclose(mapped[number], run(rng), atol=1e-6)


@tiled_and_slow_reference
def test_gradient_with_the_rng_held(implementation):
    attend = functools.partial(
        attention, mask=padding_mask(np.array(4)), dropout_rate=0.4, dropout_rng=RNG,
        implementation=implementation,
    )  # fmt: skip
    with jax.enable_x64(True):
        check_derivatives(attend, *arrays(float), forward=implementation == "reference")
