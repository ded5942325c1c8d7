"""Identities between normalisers, derivatives in every mode, and the contract for rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normalizer_cases import (
    NORMALIZER_CASES,
    sparsemax_by_sorting,
)
from normalizer_inputs import BLOCKS, KEY, QUERY, RNG, TABLE, S, T, arrays, params_of
from quick_compilation import quick_jit

import attention_jax as aj
from attention_jax.implementations import PORTABLE

# --- identities ---


@pytest.mark.parametrize("implementation", PORTABLE)
def test_ssmax_with_factor_1_over_log_n_is_softmax(implementation):
    """Each example of a batch has its own number of keys n, and its own factor."""
    lengths = np.array([3, 7, S])
    query, key, value = (
        jnp.broadcast_to(array, (3, *array.shape)) for array in arrays(jnp.float32)
    )
    options = {"mask": aj.padding_mask(jnp.asarray(lengths)), "implementation": implementation}
    options |= {"return_statistics": True, "block_sizes": BLOCKS}
    expected = aj.attention(query, key, value, **options)
    params = {"scale": jnp.asarray(1 / np.log(lengths), jnp.float32), "normalizer": {}}
    got = aj.attention(query, key, value, normalizer="ssmax", normalizer_params=params, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, expected)


def test_log_scaling_starts_at_a_length():
    """Up to n_0 keys the factor is 1, and one key has weight 1 with every factor."""
    logits = jnp.asarray(QUERY @ KEY.T, jnp.float32)
    for start in (S, 100):
        same = aj.LogScaled(start=start)({}, logits)
        np.testing.assert_allclose(same, jax.nn.softmax(logits), atol=1e-6)
    one = jnp.arange(S) == 4
    weights = aj.LogScaled()({}, logits, jnp.broadcast_to(one, logits.shape))
    np.testing.assert_array_equal(weights, np.broadcast_to(one, logits.shape).astype(np.float32))


def test_entmax_between_softmax_and_sparsemax():
    with jax.enable_x64(True):
        logits = jnp.asarray(RNG.normal(size=(T, S)) * 2)
        near_softmax = aj.Entmax(1 + 1e-7)({}, logits)
        np.testing.assert_allclose(near_softmax, jax.nn.softmax(logits), atol=1e-6)
        sparse = np.stack([sparsemax_by_sorting(row[None])[0] for row in np.asarray(logits)])
        np.testing.assert_allclose(aj.Entmax(2.0)({}, logits), sparse, atol=1e-15)
        nearly = aj.Entmax(1.0001)({}, logits.astype(jnp.float32))
        np.testing.assert_allclose(nearly, jax.nn.softmax(logits), atol=2e-4)


def test_known_weights():
    """Sparsemax of two logits is a line, sigmoid of n equal logits 0 is 1 / (n + 1)."""
    logits = jnp.array([[0.25, -0.25, -9.0]])
    np.testing.assert_allclose(aj.Entmax(2.0)({}, logits), [[0.75, 0.25, 0]], atol=1e-6)
    np.testing.assert_allclose(aj.Sigmoid()({}, jnp.zeros((1, 3))), [[0.25] * 3], atol=1e-7)
    np.testing.assert_allclose(aj.Softmax()({}, jnp.zeros((1, 4))), [[0.25] * 4])
    with jax.enable_x64(True):  # softmax as its own generic normaliser, with a search
        logits = jnp.asarray(RNG.normal(size=(T, S)))
        searched = SearchedSoftmax()({}, logits)
        np.testing.assert_allclose(searched, jax.nn.softmax(logits), atol=1e-15)


class SearchedSoftmax(aj.Normalizer):
    convex = True

    def weight(self, params, shifted):
        return jnp.exp(shifted)

    def inverse(self, params, weight):
        return jnp.log(weight)


@pytest.mark.parametrize("name", ["sparsemax", "entmax", "entmax(alpha=1.1)", "entmax(alpha=2.5)"])
def test_thresholds_of_hard_rows(name):
    """Equal logits, one key, logits of 1e4, and ten thousand keys at slowly falling logits."""
    with jax.enable_x64(True):
        n = 10_000
        rows = jnp.stack(
            [
                jnp.zeros(n),
                jnp.linspace(-1, 0, n),
                jnp.geomspace(1e-9, 30, n)[::-1],
                -((jnp.arange(n) / n) ** 4) * 3,
                jnp.where(jnp.arange(n) < 2, 1e4, -1e4),
                jnp.where(jnp.arange(n) == 7, 2.0, -jnp.inf),
                jax.random.normal(jax.random.key(0), n),
                jax.random.cauchy(jax.random.key(1), n),
            ]
        )
        weights = aj.get_normalizer(name)({}, rows)
        tolerance = 1e-12 if aj.get_normalizer(name).convex else 1e-6
        np.testing.assert_allclose(weights.sum(1), 1, atol=tolerance)
        if name == "sparsemax":
            for row, got in zip(np.asarray(rows), weights, strict=True):
                finite = np.isfinite(row)
                expected = sparsemax_by_sorting(row[finite][None])[0]
                np.testing.assert_allclose(got[finite], expected, atol=1e-12)
    narrow = aj.get_normalizer(name)({}, rows.astype(jnp.float32))
    np.testing.assert_allclose(narrow, weights, atol=3e-6)


# --- derivatives ---


FAST = ("log_scaled", "own_power", "sink")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in NORMALIZER_CASES
    ],
)
def test_every_mode_to_third_order(name):
    """With dropout and a mask: in tiles as by automatic differentiation of the reference."""
    normalizer = NORMALIZER_CASES[name].normalizer
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params_of(normalizer))
        primals = (*arrays(jnp.float64), params)
        tangents = jax.tree.map(jnp.cos, primals)

        def derivatives(implementation):
            def loss(query, key, value, params):
                output = aj.attention(
                    query,
                    key,
                    value,
                    mask=TABLE,
                    normalizer=normalizer,
                    normalizer_params=params,
                    dropout_rate=0.25,
                    dropout_rng=jax.random.key(3),
                    implementation=implementation,
                    block_sizes=BLOCKS,
                )
                return jnp.sum(jnp.sin(3 * output))

            gradient = jax.grad(loss, (0, 1, 2, 3))

            def along(primals):  # forward over reverse
                return jax.jvp(lambda *args: gradient(*args), primals, tangents)[1]

            def all_modes(primals):
                first = jax.jvp(loss, primals, tangents)[1]
                return (
                    gradient(*primals),
                    first,
                    jax.jvp(lambda *args: along(args), primals, tangents),
                )

            return quick_jit(all_modes)(primals)

        got, expected = derivatives("tiled"), derivatives("reference")

    def close(got, expected):
        scale = np.max(np.abs(expected), initial=1.0)
        np.testing.assert_allclose(got, expected, atol=1e-8 * scale)

    jax.tree.map(close, got, expected)
