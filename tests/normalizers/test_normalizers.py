"""Every normaliser with every mask and implementation; identities; hard rows; derivatives."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_MASKS, check_conformance
from normalizer_cases import NORMALIZER_CASES, OwnSoftplus, sparsemax_by_sorting
from oracles import assert_close, normal, softmax
from quick_compilation import quick_jit
from score_cases import slow_unless

import attention_jax as aj

# In tiles: a softmax with all that a normaliser can add, a search for a threshold, a plain sum. The
# formulas of the others are tested once, in the cheaper implementation.
FAST = [(name, "tiled") for name in ("scaled_sink", "log_scaled", "own_power")]
FAST += [(name, "reference") for name in ("ssmax", "sigmoid", "sparsemax", "entmax")]


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


@pytest.mark.parametrize(
    ("name", "implementation"),
    slow_unless(FAST, itertools.product(NORMALIZER_CASES, ("tiled", "reference"))),
)
def test_all_masks_with_poisoned_padding(name, implementation):
    score = "general" if name == "own_power" else "scaled"  # one with parameters
    for mask in ALL_MASKS:
        check_conformance(
            implementation, score, mask, jnp.float64, normalizer_name=name, poison=True,
            as_table=True,
        )  # fmt: skip


# --- identities ---


def test_ssmax_with_factor_1_over_log_n_is_softmax():
    """Each example of a batch has its own number of keys n, and its own factor."""
    lengths = np.array([3, 7, S])
    query, key, value = (
        jnp.broadcast_to(array, (3, *array.shape)) for array in arrays(jnp.float32)
    )
    options = {"mask": aj.padding_mask(jnp.asarray(lengths)), "return_statistics": True}
    params = {"scale": jnp.asarray(1 / np.log(lengths), jnp.float32), "normalizer": {}}
    options_of_ssmax = {"normalizer": "ssmax", "normalizer_params": params, **options}
    expected = aj.attention(query, key, value, implementation="reference", **options)
    got = aj.attention(
        query, key, value, implementation="tiled", block_sizes=BLOCKS, **options_of_ssmax
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=2e-6)


def test_known_weights():
    """Limits of the formulas, and weights that can be written down."""
    logits = normal(T, S, dtype=np.float64) * 2
    one = np.broadcast_to(np.arange(S) == 4, logits.shape)

    @quick_jit
    def weights_of_each(logits):
        return {
            # Softmax as its own generic normaliser, with a search.
            "searched": (SearchedSoftmax()({}, logits), 1e-15),
            "entmax near softmax": (aj.Entmax(1 + 1e-7)({}, logits), 1e-6),
            "in float32": (aj.Entmax(1.0001)({}, logits.astype(jnp.float32)), 2e-4),
            # Up to the length `start` the factor is 1.
            "start": (aj.LogScaled(start=S)({}, logits), 1e-12),
            "later start": (aj.LogScaled(start=100)({}, logits), 1e-12),
        }, aj.LogScaled()({}, logits, one)

    with jax.enable_x64(True):
        near_softmax, of_one_key = weights_of_each(logits)
        sparse = aj.Entmax(2.0)({}, logits)
    for name, (weights, tolerance) in near_softmax.items():
        np.testing.assert_allclose(weights, softmax(logits), atol=tolerance, err_msg=name)
    np.testing.assert_array_equal(of_one_key, one)  # one key has weight 1 with every factor
    expected = np.stack([sparsemax_by_sorting(row[None])[0] for row in logits])
    np.testing.assert_allclose(sparse, expected, atol=1e-15)


class SearchedSoftmax(aj.Normalizer):
    convex = True

    def weight(self, params, shifted):
        return jnp.exp(shifted)

    def inverse(self, params, weight):
        return jnp.log(weight)


@pytest.mark.parametrize("name", ["sparsemax", "entmax", "entmax(alpha=1.1)", "entmax(alpha=10)"])
def test_thresholds_of_hard_rows(name):
    """Equal logits, one key, logits of 1e4, and ten thousand keys at slowly falling logits."""
    n, random = 10_000, np.random.default_rng(0)
    rows = np.stack(
        [
            np.zeros(n),
            np.linspace(-1, 0, n),
            np.geomspace(1e-9, 30, n)[::-1],
            -((np.arange(n) / n) ** 4) * 3,
            np.where(np.arange(n) < 2, 1e4, -1e4),
            np.where(np.arange(n) == 7, 2.0, -np.inf),
            random.normal(size=n),
            random.standard_cauchy(size=n),
        ]
    )
    normalizer = aj.get_normalizer(name)
    weights_of = quick_jit(lambda rows: normalizer({}, rows))
    with jax.enable_x64(True):
        weights = np.asarray(weights_of(rows))
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    if name == "sparsemax":
        for row, got in zip(rows, weights, strict=True):
            finite = np.isfinite(row)
            expected = sparsemax_by_sorting(row[finite][None])[0]
            np.testing.assert_allclose(got[finite], expected, atol=1e-12)
    np.testing.assert_allclose(weights_of(rows.astype(np.float32)), weights, atol=3e-6)


def test_every_alpha():
    """Rows sum to 1; weights and gradients are as in float64, those of small weights too."""
    logits = np.concatenate([np.zeros((1, 9)), np.round(normal(40, 9, dtype=np.float64), 1)])
    cotangents = normal(41, 9, seed=1, dtype=np.float64)

    @functools.partial(quick_jit, static_argnums=0)
    def weights_and_gradients(alphas, logits, cotangents):
        return {
            alpha: (weights, pull_back(cotangents)[0])
            for alpha in alphas
            for weights, pull_back in [jax.vjp(lambda x, a=alpha: aj.Entmax(a)({}, x), logits)]
        }

    alphas = (1.0001, 4.0, 10.0, 100.0, 1e6)
    narrow = weights_and_gradients(alphas, *map(jnp.float32, (logits, cotangents)))
    with jax.enable_x64(True):
        wide = jax.tree.map(np.asarray, weights_and_gradients(alphas, logits, cotangents))
    for alpha in alphas:
        (weights, gradient), (expected, exact) = narrow[alpha], wide[alpha]
        np.testing.assert_allclose(expected.sum(1), 1, atol=1e-12, err_msg=str(alpha))
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6, err_msg=str(alpha))
        if alpha <= 10:
            np.testing.assert_allclose(weights, expected, atol=1e-6, err_msg=str(alpha))
        if alpha <= 4:
            tolerance = 1e-5 if alpha <= 2 else 1e-2
            np.testing.assert_allclose(gradient, exact, tolerance, tolerance, err_msg=str(alpha))


@pytest.mark.parametrize("keys", [1, S])
def test_a_score_of_minus_infinity(keys):
    """As a bias of -inf."""

    def score(query, key):
        logits = query @ key.T
        return jnp.where(logits < 0.5, -jnp.inf, logits)

    query, key, value = arrays()
    bias = np.where(QUERY @ KEY[:keys].T < 0.5, -np.inf, 0).astype(np.float32)

    @functools.partial(quick_jit, static_argnums=(0, 1))
    def value_and_gradients(implementation, score, bias):
        def loss(query, key, value, params):
            output = aj.attention(
                query, key, value, score=score, bias=bias, normalizer="ssmax",
                normalizer_params=params, implementation=implementation,
            )  # fmt: skip
            return jnp.sum(jnp.sin(output))

        params = {"scale": jnp.ones(()), "normalizer": {}}
        return jax.value_and_grad(loss, (0, 1, 2, 3))(query, key[:keys], value[:keys], params)

    expected = value_and_gradients("reference", "dot", bias)
    for implementation in ("reference", "tiled"):
        got = value_and_gradients(implementation, score, None)
        chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-5)


# --- dtypes, batches, rings ---


@pytest.mark.parametrize(
    ("name", "dtype", "implementation"),
    [("entmax", jnp.bfloat16, "tiled"), ("softmax(sink=True)", jnp.float16, "reference")],
)
def test_narrow_dtypes(name, dtype, implementation):
    """As the weights of the same numbers in float32."""
    normalizer = aj.get_normalizer(name)
    options = {"mask": TABLE, "normalizer": normalizer, "normalizer_params": params_of(normalizer)}

    @quick_jit
    def both(*tokens):
        wide = [token.astype(jnp.float32) for token in tokens]
        tiles = {"implementation": implementation, "block_sizes": BLOCKS}
        return aj.attention(*tokens, **options, **tiles), aj.attention_weights(*wide[:2], **options)

    output, weights = both(*arrays(dtype))
    assert output.dtype == dtype
    assert not np.any(np.asarray(weights)[~TABLE])
    np.testing.assert_allclose(output.astype(np.float32), weights @ VALUE, atol=0.05)


@dataclasses.dataclass(frozen=True)
class WideTransform(aj.Softmax):
    def transform(self, params, logits, num_keys):
        return (2 * logits).astype(float)


@dataclasses.dataclass(frozen=True)
class WideWeight(OwnSoftplus):
    """A line from 0 to 1, flat from there on: a key with all the weight leaves no slope."""

    def weight(self, params, shifted):
        line = jax.nn.relu(params["scale"] * shifted)
        passed = jnp.minimum(jnp.floor(line), 1)
        return (line + passed * (1 - line)).astype(float)

    def inverse(self, params, weight):
        return (weight / params["scale"]).astype(float)


@aj.bias_dataclass
class WideBias(aj.Bias):
    rate: jax.Array = aj.array_field()

    def values(self, query_positions, key_positions):
        distances = query_positions[:, None] - key_positions[None]
        return (-self.rate * distances.astype(self.rate.dtype)).astype(float)


@pytest.mark.parametrize("normalizer", [WideTransform(), WideWeight()])
def test_parts_of_a_user_that_compute_in_float64(normalizer):
    """Gradients of float32 tokens, with x64, in tiles as in the reference implementation."""
    params = normalizer.init(None)

    @functools.partial(quick_jit, static_argnums=0)
    def gradient(implementation, query, key, value):
        return jax.vjp(
            lambda query: aj.attention(
                query, key, value, bias=WideBias(jnp.ones((), query.dtype)), normalizer=normalizer,
                normalizer_params=params, implementation=implementation, block_sizes=BLOCKS,
            ),
            query,
        )[1](value[:T])  # fmt: skip

    with jax.enable_x64(True):
        (got,), (expected,) = (gradient(name, *arrays()) for name in ("tiled", "reference"))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)
    logits = np.sort(QUERY @ KEY.T / D**0.5 - np.subtract.outer(np.arange(T), np.arange(S)))
    alone = (logits[:, -1] - logits[:, -2] >= 1) & isinstance(normalizer, WideWeight)
    np.testing.assert_array_equal(np.any(got, axis=1), ~alone)


def test_ring_attention():
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    tokens = normal(6, 3)
    for name in ("sigmoid", "softmax(sink=True)"):
        params = params_of(aj.get_normalizer(name))
        options = {"mask": aj.causal_mask(), "normalizer": name, "normalizer_params": params}
        got = aj.ring_attention(tokens, tokens, tokens, mesh=mesh, **options)
        expected = aj.attention(tokens, tokens, tokens, implementation="reference", **options)
        np.testing.assert_allclose(got, expected, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"Entmax.*threshold"):
        aj.ring_attention(tokens, tokens, tokens, mesh=mesh, normalizer="entmax")


# --- derivatives ---


# A threshold, and a parameter of the weights.
@pytest.mark.parametrize("name", slow_unless(["own_softplus"], NORMALIZER_CASES))
def test_two_orders_in_both_modes(name):
    """With dropout and a mask: in tiles as by automatic differentiation of the reference."""
    normalizer = NORMALIZER_CASES[name].normalizer
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params_of(normalizer))
        primals = (*arrays(jnp.float64), params)
        tangents = jax.tree.map(jnp.cos, primals)

        @functools.partial(quick_jit, static_argnums=0)
        def derivatives(implementation, *primals):
            """The loss, its gradient, and the tangents of both."""

            def loss(query, key, value, params):
                output = aj.attention(
                    query, key, value, mask=TABLE, normalizer=normalizer, normalizer_params=params,
                    dropout_rate=0.25, dropout_rng=jax.random.key(3), block_sizes=BLOCKS,
                    implementation=implementation,
                )  # fmt: skip
                return jnp.sum(jnp.sin(3 * output))

            return jax.jvp(jax.value_and_grad(loss, (0, 1, 2, 3)), primals, tangents)

        got, expected = derivatives("tiled", *primals), derivatives("reference", *primals)
    assert_close("", got, expected, 1e-8, terms=1.0)
