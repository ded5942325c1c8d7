"""The formulas of experiments/scores, against independent numbers and limits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import softmax

from attention_jax import SCORES, attention, attention_weights, nn
from experiments import entropy_limits as limits
from experiments.scores import (
    entropy_vs_dimension,
    geometry,
    qkv_walkthrough,
    score_variance,
    softmax_saturation,
    worked_example,
)
from experiments.torch_random import TorchRandom

# --- worked_example ---


def test_torch_numbers():
    """Compares with PyTorch 2: fewer than 16 numbers, and more, with and without a remainder."""
    np.testing.assert_allclose(
        TorchRandom(0).randn(3), [1.5409961, -0.2934289, -2.1787894], rtol=1e-6
    )
    of_21 = TorchRandom(0).randn(21)[[0, 4, 5, 20]]
    np.testing.assert_allclose(of_21, [-1.1258, 0.8487, -1.5551, 0.6181], atol=6e-5)
    last_row = [0.5616, -0.2481, -1.0800, 0.5916, 0.7242, -0.3492, -0.5290, -0.6895]
    np.testing.assert_allclose(TorchRandom(3).randn(5, 8)[-1], last_row, atol=6e-5)
    # A pair's second number is kept, also from one call to the next.
    one_by_one = TorchRandom(0)
    parts = [one_by_one.randn(1), one_by_one.randn(2)]
    np.testing.assert_array_equal(np.concatenate(parts), TorchRandom(0).randn(3))


def test_steps_of_the_pair_in_numpy():
    random = TorchRandom(11)
    kernel, both, v = (0.3 * random.randn(*shape).astype(float) for shape in ((4, 4), (4, 8), (4,)))
    s, h = np.array(worked_example.QUERY)[0], np.array(worked_example.KEY)[0]
    hidden = np.tanh(both @ np.concatenate([s, h]))
    params = worked_example.source_parameters()
    general = worked_example.steps("general", params["general"])
    additive = worked_example.steps("additive", params["additive"])
    np.testing.assert_allclose(general["step"], s @ kernel, atol=1e-6)
    stretched = np.linalg.svd(kernel)[1]  # all equal, if general were dot after a rotation
    assert stretched[0] / stretched[-1] == pytest.approx(11, abs=0.5)
    np.testing.assert_allclose(sum(general["summands"]), s @ kernel @ h, atol=1e-6)
    np.testing.assert_allclose(additive["step"], hidden, atol=1e-6)
    np.testing.assert_allclose(sum(additive["summands"]), v @ hidden, atol=1e-6)


def test_three_tokens_by_hand():
    """E11.1: e^(1/sqrt 2) = 2.0281 and e^(1/(2 sqrt 2)) = 1.4241, so a row sums to 4.4522."""
    query, key = worked_example.THREE_QUERIES, worked_example.THREE_KEYS
    by_calculator = [[0.4555, 0.2246, 0.3199], [0.2246, 0.4555, 0.3199], [0.3333, 0.3333, 0.3333]]
    np.testing.assert_allclose(attention_weights(query, key), by_calculator, atol=6e-5)
    output = [[0.6155, 0.3845], [0.3845, 0.6155], [0.5, 0.5]]
    np.testing.assert_allclose(attention(query, key, key), output, atol=6e-5)
    saturated = jax.nn.softmax(jnp.array([10.0, 0.0, 0.0]))  # §11.4
    np.testing.assert_allclose(saturated, [0.99991, 0.0000454, 0.0000454], rtol=1e-4)


def test_the_matrix_form_is_the_loop_form():
    random = TorchRandom(3)  # §38.9
    query, key, value = (random.randn(5, 8) for _ in range(3))
    loop = [softmax([sum(s * h) / math.sqrt(8) for h in key.astype(float)]) @ value for s in query]
    np.testing.assert_allclose(attention(query, key, value), loop, atol=1e-6)


# --- score_variance ---


def sampled(query_mean, key_mean, deviations, tokens, rows=4000, length=10):
    """Variance over all pairs and within a row, in float64 NumPy."""
    rng, dim = np.random.default_rng(0), len(query_mean)
    query = query_mean + deviations[0] * rng.normal(size=(rows, 1, dim))
    key = key_mean + deviations[1] * rng.normal(size=(rows, length, dim))
    if tokens == "LayerNorm":
        query, key = (x - x.mean(axis=-1, keepdims=True) for x in (query, key))
    if tokens != "tokens as they are":
        query, key = (x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) for x in (query, key))
    logits = np.sum(query * key, axis=-1) / np.sqrt(dim)
    return logits[:, 0].var(), logits.var(axis=1, ddof=1).mean()


@pytest.mark.parametrize("tokens", score_variance.NORMALISATIONS)
@pytest.mark.parametrize("same", [True, False])
def test_variances_by_formula(same, tokens):
    dim, deviations = 64, (0.8, 1.3)
    pattern = np.random.default_rng(1).normal(size=dim)  # means that are not at right angles
    means = (np.full(dim, 0.7), np.full(dim, -1.1)) if same else (pattern, pattern + 0.5)
    pairs, row = score_variance.variances_by_formula(means, deviations, tokens)
    # 4000 pairs: 4 sqrt(2 / 4000) = 9 %; rows have 10 times as many. And 3 / D for the limit.
    measured = sampled(*means, deviations, tokens)
    np.testing.assert_allclose(pairs, measured[0], rtol=0.1)
    np.testing.assert_allclose(row, measured[1], rtol=0.05)


def test_half_of_fresh_additives_variance_lies_within_a_row():
    """1 - E_a[(E_b tanh(a + b))²] / E[tanh²] with a, b of N(0, 1/2), by Gauss-Hermite quadrature;
    against the library's logits at D = 64, with 1 / 2D since tanh is not linear."""
    points, weights = np.polynomial.hermite.hermgauss(64)
    weights = weights / weights.sum()
    tanh = np.tanh(points[:, None] + points[None, :])
    share = 1 - weights @ (tanh @ weights) ** 2 / (weights @ tanh**2 @ weights)

    @jax.jit
    def row_variance(rng):
        param_rng, token_rng = jax.random.split(rng)
        params = SCORES["additive"].init(param_rng, 64, 64)
        logits = SCORES["additive"](params, *jax.random.normal(token_rng, (2, 64, 64)))
        return logits.var(axis=1, ddof=1).mean()

    measured = np.array(jax.lax.map(row_variance, jax.random.split(jax.random.key(0), 64)))
    within = 4 * float(measured.std(ddof=1)) / 8 + 0.5 / 64
    assert share == pytest.approx(0.527, abs=1e-3)
    assert measured.mean() == pytest.approx(share, abs=within)


# --- softmax_saturation ---


@pytest.mark.parametrize("scale", [0.3, 5.8, 20.0])
def test_the_norm_of_even_scores_against_differences(scale):
    keys, step = 7, 1e-6

    def largest_weight(scores):
        return softmax(scores)[-1]

    up, down = (scale * np.linspace(-1, 1, keys) + sign * step * np.eye(keys) for sign in (1, -1))
    rises = [largest_weight(a) - largest_weight(b) for a, b in zip(up, down, strict=True)]
    expected = np.linalg.norm(rises) / (2 * step)
    assert softmax_saturation.even_norm(keys, scale) == pytest.approx(expected, rel=1e-6)


def test_the_peak_of_even_scores_against_a_search():
    scales = np.arange(0.1, 20, 1e-3)
    norms = [softmax_saturation.even_norm(16, scale) for scale in scales]
    assert softmax_saturation.even_peak(16) == pytest.approx(scales[np.argmax(norms)], abs=2e-3)


# --- entropy_vs_dimension ---


def test_the_expected_maximum_and_the_mean_inverse_norm():
    # David and Nagaraja, "Order Statistics": 1/sqrt(pi) of two, 3/(2 sqrt(pi)) of three.
    assert limits.expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-9)
    assert limits.expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-9)
    assert limits.mean_inverse_norm(2) == pytest.approx(math.sqrt(math.pi / 2))
    assert limits.mean_inverse_norm(4096) == pytest.approx(1 / 64, rel=1e-3)


@pytest.mark.parametrize(
    ("sigma", "keys", "limit", "within"),
    [
        (1.0, 256, limits.scaled_entropy_limit(256), 0.01),
        (64.0, 16, limits.raw_entropy_limit(64**2, 16), 0.004),  # of 0.05
    ],
)
def test_the_limits_of_entropy(sigma, keys, limit, within):
    logits = sigma * np.random.default_rng(2).normal(size=(640_000 // keys, keys))
    weights = softmax(logits)
    entropies = -np.sum(weights * np.log(np.maximum(weights, 1e-300)), axis=1)
    assert limit == pytest.approx(entropies.mean(), abs=within)


def test_the_fall_of_entropy_in_nats_and_as_a_share():
    """Lines of known slope: 3 nats per doubling for two keys, 5 for 32, and noise of its groups."""
    noise = dict(zip((2, 32), np.random.default_rng(4).normal(0, 0.01, size=(2, 10)), strict=True))
    point = {"part": "sweep", "score": "dot"}
    rows = [
        {**point, "keys": keys, "dim": 2**n, "groups": list(100 - (fall + noise[keys]) * n)}
        for keys, fall in ((2, 3), (32, 5))
        for n in range(1, 6)
    ]
    mean, half = entropy_vs_dimension.faster(rows, "nats")
    assert mean == pytest.approx(2 + noise[32].mean() - noise[2].mean())
    variance = noise[2].var(ddof=1) + noise[32].var(ddof=1)
    assert half == pytest.approx(2.2621572 * np.sqrt(variance / 10))
    mean, _ = entropy_vs_dimension.faster(rows, "share of log T")
    assert mean == pytest.approx(
        (5 + noise[32].mean()) / math.log(32) - (3 + noise[2].mean()) / math.log(2)
    )


# --- geometry ---


def test_orthogonal_keys_follow_the_formula():
    """The first of 7 keys has the weight 1 / (1 + 6 e^-g); |J|² is summed over all its entries."""
    keys = jnp.asarray(math.sqrt(13) * np.eye(13)[None, :7], jnp.float32)
    scales = jnp.array([0.01, 0.1, 0.3])
    row = geometry.scale_sweep("dot", {}, keys, scales)
    for scale, first, norm in zip(scales, row["weight"], row["jacobian"], strict=True):
        weights = softmax([13 * float(scale), 0, 0, 0, 0, 0, 0])
        assert first == pytest.approx(weights[0], rel=1e-4)
        jacobian = np.diag(weights) - np.outer(weights, weights)
        assert norm == pytest.approx(np.linalg.norm(jacobian), rel=1e-4)


# --- qkv_walkthrough ---


def test_the_sources_softmax_in_numpy():
    tokens, projections = (np.asarray(x, float) for x in qkv_walkthrough.source_arrays())
    query, key, _ = (tokens @ projection for projection in projections)
    logits = query @ key.T / np.sqrt(32)
    sums = softmax(logits.T).sum(axis=0)  # of each column of logits
    assert sums.max() == pytest.approx(5, abs=0.01)
    assert np.sum(sums < 0.01) == 7  # queries that get nothing
    np.testing.assert_array_equal(logits[3], logits[6])  # token 9 occurs twice
    ids = list(qkv_walkthrough.TOKEN_IDS)
    np.testing.assert_array_equal(tokens, projections[0][ids])  # of one seed


# --- what topic 7 says of shapes and products ---


def test_swiglu_has_another_kernel():
    for name, size in {"relu": 1072, "gelu": 1072, "swiglu": 1536}.items():
        network = nn.FeedForward(16, 32, activation=name, rngs=nnx.Rngs(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(network))) == size
