"""Inputs of local attention: batch axes, lengths, dtypes, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_IMPLEMENTATIONS, TILE, quick_jit

from attention_jax.functional.centers import monotonic_centers, reversed_centers
from attention_jax.functional.local import local_attention, local_attention_weights, window_mask

B, T, S = 2, 5, 7
RADIUS = 2
CENTERS = np.float32([[0.3, 2.25, 6.0, -1.7, 9.5], [3.5, 1.0, -4.0, 2.9, 0.0]])
SHARED_CENTERS = np.float32([0.3, 4.25, 2.0, -1.7, 99.0])


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def test_known_alignments():
    assert monotonic_centers(4).tolist() == [0, 1, 2, 3]
    centers = reversed_centers(3, np.array([[5], [2]]))
    assert centers.tolist() == [[[4, 3, 2]], [[1, 0, -1]]]
    # Radius 0 around the anti-diagonal turns a string around.
    value = np.arange(7, dtype=np.float32)[:, None]
    output = local_attention(value, value, value, centers=reversed_centers(7, 5), radius=0)
    assert np.asarray(output)[:, 0].tolist() == [4, 3, 2, 1, 0, 0, 0]


@functools.partial(quick_jit, static_argnames="implementation")
def jitted_attention(query, key, centers, sigma, implementation):
    return local_attention(
        query, key, key, centers=centers, radius=RADIUS, sigma=sigma,
        implementation=implementation, block_sizes=TILE,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
def test_heads_and_examples_are_a_loop(implementation):
    query, key = normal(B, 3, T, 4).astype(np.float32), normal(B, 3, S, 4).astype(np.float32)
    sigma = np.float32([0.7, 1.4, 2.1])

    arrays = query, key, CENTERS[:, None, :], sigma
    got = np.asarray(jitted_attention(*arrays, implementation=implementation))
    for b in range(B):
        for n in range(3):
            arrays = query[b, n], key[b, n], CENTERS[b], sigma[n]
            expected = jitted_attention(*arrays, implementation="reference")
            np.testing.assert_allclose(got[b, n], expected, atol=2e-6)


def test_centers_beyond_the_range_of_a_narrow_dtype():
    query = normal(1, 4).astype(np.float32)
    key = np.broadcast_to(query, (300, 4))
    value = np.arange(300, dtype=np.float32)[:, None]
    whole = np.array([127], np.int8), np.array([255], np.uint8), np.array([2], np.uint32)
    narrow = np.array([256], jnp.bfloat16)  # where bfloat16 knows every second number

    @quick_jit
    def run(query, key):
        return (
            [local_attention(query, key, value, centers=center, radius=2) for center in whole],
            window_mask(narrow, 1).materialize(1, 300).sum(),
            local_attention_weights(query, key, centers=narrow, radius=1, sigma=1.0),
        )

    outputs, count, weights = run(query, key)
    for center, output in zip(whole, outputs, strict=True):
        np.testing.assert_allclose(output, center[None, :], rtol=1e-6)
    assert count == 3
    np.testing.assert_allclose(np.asarray(weights)[0, 255], np.exp(-0.5) / 3, rtol=1e-5)


@pytest.mark.parametrize(
    "implementation", ["tiled", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_narrow_inputs_and_empty_ones(implementation):
    query, key = (normal(n, 4).astype(jnp.bfloat16) for n in (T, S))
    options = {"radius": RADIUS, "sigma": 1.0}

    @quick_jit
    def run(query, key):
        attend = functools.partial(local_attention, implementation=implementation, **options)
        wide = (x.astype(jnp.float32) for x in (query, key))
        return (
            attend(query, key, key, centers=monotonic_centers(T)),
            local_attention_weights(*wide, centers=monotonic_centers(T), **options),
            attend(query, key[:0], key[:0], centers=monotonic_centers(T)),
            attend(query[:0], key, key, centers=jnp.zeros(0)),
        )

    output, weights, without_keys, without_queries = jax.tree.map(np.asarray, run(query, key))
    assert output.dtype == jnp.bfloat16
    expected = weights @ key.astype(np.float32)
    np.testing.assert_allclose(output.astype(np.float32), expected, atol=3e-2)
    assert not without_keys.any()
    assert without_queries.shape == (0, 4)


def test_dropout_drops_weights_and_keeps_their_mean():
    query, key, value = (normal(n, 4, seed=n).astype(np.float32) for n in (T, S, S + 1))
    both = np.concatenate([np.eye(S, dtype=np.float32), value[:S]], axis=1)
    options = {"centers": SHARED_CENTERS, "radius": RADIUS, "sigma": 1.2}

    def dropped(implementation, rng):
        return local_attention(
            query, key, both, **options, dropout_rate=0.25, dropout_rng=rng,
            implementation=implementation, block_sizes=TILE,
        )  # fmt: skip

    @quick_jit
    def run(rng):
        rngs = jax.random.split(jax.random.key(9), 4000)
        return (
            [dropped(implementation, rng) for implementation in ALL_IMPLEMENTATIONS],
            jax.vmap(lambda rng: dropped("reference", rng)[:, :S])(rngs).mean(0),
            local_attention_weights(query, key, **options),
        )

    outputs, mean, weights = jax.tree.map(np.asarray, run(jax.random.key(8)))
    for output in outputs:
        found, output = output[:, :S], output[:, S:]
        kept = found != 0
        np.testing.assert_allclose(found, np.where(kept, weights / 0.75, 0), atol=1e-6)
        assert 0 < kept.sum() < np.count_nonzero(weights)
        np.testing.assert_allclose(output, found @ value[:S], atol=3e-6)
    np.testing.assert_allclose(mean, weights, atol=0.01)
