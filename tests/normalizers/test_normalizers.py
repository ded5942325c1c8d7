"""Every normaliser with every mask and implementation; identities; hard rows; derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    ALL_MASKS,
    check_conformance,
)
from normalizer_cases import NORMALIZER_CASES, sparsemax_by_sorting
from oracles import normal
from quick_compilation import quick_jit

import attention_jax as aj

every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
SLOW = ("softmax", "scaled_sink", "scaled_sigmoid", "sigmoid_learned", "entmax_1.2", "entmax_3")
FAST = [name for name in NORMALIZER_CASES if name not in SLOW]
T, S, D = 5, 11, 3
BLOCKS = aj.BlockSizes(2, 4)
QUERY, KEY, VALUE = (normal(n, D, seed=n, dtype=np.float64) for n in (T, S, S + 1))
VALUE = VALUE[:S]
TABLE = np.random.default_rng(2).random((T, S)) < 0.6
TABLE[3] = False


def arrays(dtype=jnp.float32):
    """Query, key and value."""
    return tuple(jnp.asarray(array, dtype) for array in (QUERY, KEY, VALUE))


def params_of(normalizer):
    """Parameters of a normaliser that are not their initial values."""
    return jax.tree.map(lambda leaf: leaf + 0.25, normalizer.init(jax.random.key(0)))


# --- against NumPy ---


@every_implementation
@pytest.mark.parametrize("name", FAST)
def test_all_masks_with_poisoned_padding(name, implementation):
    for mask in ALL_MASKS:
        check_conformance(
            implementation, "scaled", mask, jnp.float64, normalizer_name=name, poison=True,
            as_table=True,
        )  # fmt: skip


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize("name", NORMALIZER_CASES)
@pytest.mark.parametrize("score_name", ["scaled", "additive", "general"])
def test_scores_and_masks(score_name, name, implementation):
    for mask in ALL_MASKS:
        check_conformance(
            implementation, score_name, mask, jnp.float64, normalizer_name=name, as_table=True
        )


@pytest.mark.parametrize("name", ["entmax", "sink"])
def test_a_score_with_parameters_in_tiles(name):
    for mask in ("dense", "none"):
        check_conformance(
            "tiled", "general", mask, jnp.float64, normalizer_name=name, as_table=True
        )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "entmax")) for name in FAST],
)
def test_float32(name):
    for mask in ALL_MASKS:
        check_conformance("tiled", "scaled", mask, normalizer_name=name, as_table=True)


# --- identities ---


@every_implementation
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
        logits = jnp.asarray(normal(T, S, dtype=np.float64) * 2)
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
        logits = jnp.asarray(normal(T, S, dtype=np.float64))
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


# --- rows without keys, dtypes, batches, rings ---


@pytest.mark.parametrize("name", ["entmax", "sigmoid", "softmax(sink=True)"])
def test_narrow_dtypes(name):
    normalizer = aj.get_normalizer(name)

    def output(dtype, implementation):
        result = aj.attention(
            *arrays(dtype), mask=TABLE, normalizer=normalizer, block_sizes=BLOCKS,
            normalizer_params=jax.tree.map(lambda leaf: leaf.astype(dtype), params_of(normalizer)),
            implementation=implementation,
        )  # fmt: skip
        assert result.dtype == dtype
        return np.asarray(result, np.float32)

    for implementation in ALL_IMPLEMENTATIONS:
        expected = output(jnp.float32, implementation)
        np.testing.assert_allclose(output(jnp.bfloat16, implementation), expected, atol=0.05)
        np.testing.assert_allclose(output(jnp.float16, implementation), expected, atol=0.01)


def test_batch_axes_of_params_and_vmap():
    """One sink per head: a batch axis of the parameter; and `vmap` over a loop's examples."""
    query, key, value = (normal(2, 3, n, D, seed=i) for i, n in enumerate((T, S, S)))
    sinks = np.float32([-1.0, 0.0, 2.0])
    for implementation in ALL_IMPLEMENTATIONS:

        def attend(query, key, value, sink, implementation=implementation):
            return aj.attention(
                query, key, value, normalizer="softmax(sink=True)", block_sizes=BLOCKS,
                normalizer_params={"sink": sink}, implementation=implementation,
            )  # fmt: skip

        at_once = attend(query, key, value, sinks)
        by_vmap = jax.vmap(jax.vmap(attend), (0, 0, 0, None))(query, key, value, sinks)
        one = attend(query[1, 2], key[1, 2], value[1, 2], sinks[2])
        np.testing.assert_allclose(at_once, by_vmap, atol=1e-6)
        np.testing.assert_allclose(at_once[1, 2], one, atol=1e-6)


def test_weights_times_values_are_the_output():
    for name in ("entmax", "sigmoid", "sparsemax"):
        query, key, value = arrays()
        weights = aj.attention_weights(query, key, mask=TABLE, normalizer=name)
        output = aj.attention(query, key, value, mask=TABLE, normalizer=name)
        np.testing.assert_allclose(weights @ value, output, atol=1e-6)
        assert np.all(np.asarray(weights)[~TABLE] == 0)


def test_ring_attention():
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    tokens = jax.random.normal(jax.random.key(0), (6, 3))
    for name in ("sigmoid", "softmax(sink=True)"):
        params = params_of(aj.get_normalizer(name))
        options = {"mask": aj.causal_mask(), "normalizer": name, "normalizer_params": params}
        got = aj.ring_attention(tokens, tokens, tokens, mesh=mesh, **options)
        expected = aj.attention(tokens, tokens, tokens, **options)
        np.testing.assert_allclose(got, expected, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"Entmax.*threshold"):
        aj.ring_attention(tokens, tokens, tokens, mesh=mesh, normalizer="entmax")


# --- derivatives, and long rows ---


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] * (name not in ("log_scaled", "own_power", "sink"))
        )
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
                    query, key, value, mask=TABLE, normalizer=normalizer, normalizer_params=params,
                    dropout_rate=0.25, dropout_rng=jax.random.key(3), block_sizes=BLOCKS,
                    implementation=implementation,
                )  # fmt: skip
                return jnp.sum(jnp.sin(3 * output))

            gradient = jax.grad(loss, (0, 1, 2, 3))

            def along(*primals):  # forward over reverse
                return jax.jvp(gradient, primals, tangents)[1]

            @quick_jit
            def all_modes(*primals):
                first = jax.jvp(loss, primals, tangents)[1]
                return gradient(*primals), first, jax.jvp(along, primals, tangents)

            return all_modes(*primals)

        got, expected = derivatives("tiled"), derivatives("reference")
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        scale = np.max(np.abs(other), initial=1.0)
        np.testing.assert_allclose(one, other, atol=1e-8 * scale)
