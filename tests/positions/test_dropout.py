"""Dropout: a function of (rng, positions) alone; its statistics; its gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, DK, DV, S, T, quick_jit
from oracles import normal
from score_cases import slow_unless

from attention_jax import attention, monotonic_attention, padding_mask
from attention_jax.core.checks import counter_based
from attention_jax.positions.dropout import drop_features, keep_mask

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
    # Correlations, also of a 2 x 2 block's product, which a sum of two hashes could have, and of
    # mirrored entries.
    x = (table - 0.7) / np.sqrt(0.21)
    square = x[:, : len(x)]
    for product in (
        x[1:] * x[:-1],
        x[:, 1:] * x[:, :-1],
        x[1:, 1:] * x[:-1, :-1],
        x[1:, :-1] * x[:-1, 1:],
        x[1:, 1:] * x[:-1, :-1] * x[1:, :-1] * x[:-1, 1:],
        (square * square.T)[np.triu_indices(len(x), 1)],
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


@pytest.mark.parametrize("implementation", slow_unless(["tiled"], ALL_IMPLEMENTATIONS))
def test_output_and_gradient_are_those_of_the_kept_weights(implementation):
    tokens = tuple(normal(size, dim, dtype=float) for size, dim in ((T, DK), (S, DK), (S, DV)))
    with jax.enable_x64(True):
        seed = jax.random.split(RNG, ())  # as the batching does
        kept = keep(0.4, T, S, rng=seed) / 0.6

        def ours(*tokens):
            return attention(
                *tokens, mask=padding_mask(np.array(4)), dropout_rate=0.4, dropout_rng=RNG,
                implementation=implementation, return_statistics=True,
            )  # fmt: skip

        def plain(query, key, value):
            logits = jnp.where(np.arange(S) < 4, query @ key.T / np.sqrt(DK), -jnp.inf)
            weights = jax.nn.softmax(logits)
            return weights * kept @ value, weights

        @quick_jit
        def with_gradients(*tokens):
            return [
                (result, jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x)[0])), (0, 1, 2))(*tokens))
                for f, result in ((f, f(*tokens)) for f in (ours, plain))
            ]

        got, expected = with_gradients(*tokens)
    (output, statistics), (expected_output, weights) = got[0], expected[0]
    np.testing.assert_allclose(output, expected_output, atol=1e-14)
    chex.assert_trees_all_close(got[1], expected[1], rtol=0, atol=1e-13)
    weights = np.asarray(weights)[:, :4]  # the entropy is that before dropout
    np.testing.assert_allclose(statistics.entropy, -(weights * np.log(weights)).sum(1), rtol=1e-12)


def test_same_rng_same_result_and_examples_differ():
    tokens = [np.stack([normal(size, dim)] * 3) for size, dim in ((T, DK), (S, DK), (S, DV))]

    def run(rng):
        return attention(*tokens, dropout_rate=0.5, dropout_rng=rng, implementation="tiled")

    first = np.asarray(run(RNG))
    assert not np.array_equal(first, run(jax.random.key(14)))
    assert not np.array_equal(first[0], first[1])  # the same tokens, dropped independently
    raw = jax.random.key_data(RNG)
    np.testing.assert_array_equal(first, run(raw))
    np.testing.assert_array_equal(first, run(np.asarray(raw)))


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_an_example_is_dropped_alike_whoever_shares_the_batch(generator):
    """XLA's own generator draws for a whole batch from the key of its first example."""
    tokens, keys = normal(3, T, DK), jax.random.split(jax.random.key(5, impl=generator), 3)

    @jax.vmap
    def run(tokens, rng):
        call = {"dropout_rate": 0.5, "dropout_rng": rng}
        noisy = monotonic_attention(*(tokens,) * 3, score="dot", noise_rng=rng)
        return attention(*(tokens,) * 3, **call), noisy, drop_features(tokens, rng, 0.5)

    whole, shared = quick_jit(run)(tokens, keys), quick_jit(run)(tokens[1:], keys[1:])
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[1:], whole), shared)
    assert not np.array_equal(shared[2][0] == 0, shared[2][1] == 0)


def test_every_word_of_a_key_of_xlas_generator_counts():
    words = jnp.array([[1, 2, 1, 2], [1, 2, 3, 2], [1, 2, 1, 4], [3, 2, 1, 2], [1, 5, 1, 2]])
    keys = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="rbg")
    data = np.asarray(jax.random.key_data(counter_based(keys)))
    assert data[0].tolist() == [1, 2]
    assert len(np.unique(data, axis=0)) == len(words)
