"""geometry.py: its formulas against NumPy, and the committed numbers."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import SCORES, attention_weights
from experiments.scores import geometry

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

COMMITTED = json.loads((EXPERIMENTS / "scores" / "geometry.json").read_text())


def test_committed_numbers():
    missed = [item for item in geometry.expectations(COMMITTED) if not item.met]
    assert not missed, missed
    assert set(geometry.plot(COMMITTED)) == set(geometry.CAPTIONS)
    assert set(COMMITTED["identical_keys"]) == set(SCORES)


@pytest.fixture(scope="module")
def draws():
    return jax.jit(lambda: geometry.draw(geometry.QUICK))()


@pytest.mark.parametrize("name", ["dot", "additive"])
def test_sweeps_at_few_draws(draws, name):
    scales = jnp.array([0.0, 0.5, 1e3])
    sweep = geometry._scale_sweep(geometry.QUICK, draws, name, scales)
    limit = geometry._additive_limit(geometry.QUICK, draws)
    for expectation in geometry._sweep_expectations(name, sweep, 13, 7, limit):
        assert expectation.met, expectation
    if name == "additive":
        # The bound: no logit is larger than sum |v|.
        bound = np.abs(np.asarray(draws.params[name]["v"])).sum(axis=1).max()
        assert max(sweep["largest_weight"]["high"]) <= 1 / (1 + 6 * np.exp(-2 * bound))


def test_general_of_a_rotation_is_scaled_dot(draws):
    """With W = R / sqrt(D) a query along R k_1 gives the formula's weights, rows of 1 + 6 keys."""
    rotation, basis = np.asarray(draws.bases[1]) / np.sqrt(13), np.asarray(draws.bases[0])
    params = {"kernel": jnp.asarray(rotation / np.sqrt(13), jnp.float32)}
    query, key = basis[:1] @ rotation.T, 0.3 * basis[:7]
    weights = attention_weights(
        jnp.asarray(query, jnp.float32), jnp.asarray(key), score="general", params=params
    )
    first, _ = geometry.weights_by_formula(geometry.gap("general", 0.3, 13), 7)
    np.testing.assert_allclose(weights[0, 0], first, rtol=1e-5)
    np.testing.assert_allclose(weights[0, 1:], (1 - first) / 6, rtol=1e-5)


@pytest.mark.parametrize("gap", [0.0, 1.0, 5.0])
def test_formula_against_the_materialised_jacobian(gap):
    logits = np.array([gap, 0, 0, 0, 0])
    weights = np.exp(logits) / np.exp(logits).sum()
    first, norm = geometry.weights_by_formula(gap, 5)
    np.testing.assert_allclose(first, weights[0], rtol=1e-14)
    jacobian = np.diag(weights) - np.outer(weights, weights)
    np.testing.assert_allclose(norm, np.linalg.norm(jacobian), rtol=1e-13)


def test_formula_far_out():
    """1 - a is 0 in float64: with b = e^-200 for the others, 4^2 + 4 + 2 * 4 squares of b."""
    _, norm = geometry.weights_by_formula(200.0, 5)
    np.testing.assert_allclose(norm, np.exp(-200) * np.sqrt(16 + 4 + 8), rtol=1e-12)


@pytest.mark.parametrize("name", ["additive", "scaled"])
def test_identical_keys(draws, name):
    found = geometry.identical_keys(draws, name)
    assert found["from_uniform"] < 1e-7
    assert found["largest_dquery"] < 1e-5
    # The measurement works: different keys have both a difference and a gradient.
    query, key = draws.tokens[:, :1], draws.bases[:, :7]
    weights, pull_back = jax.vjp(
        lambda query: attention_weights(query, key, score=name, params=draws.params[name]), query
    )
    assert float(jnp.abs(weights - 1 / 7).max()) > 0.1
    assert float(jnp.abs(pull_back(draws.cotangents)[0]).max()) > 0.1


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_saturated_backward(draws, implementation):
    found = geometry._saturated(geometry.QUICK, draws, "scaled", implementation)
    assert found["not_finite"] == 0
    assert found["output_from_one_hot"] == 0
    assert found["share_of_unsaturated"] < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source_length": 1}, "source_length must be from 2 to dim - 1 = 31; got 1"),
        ({"source_length": 32}, "source_length must be from 2 to dim - 1 = 31; got 32"),
        ({"scales": 1}, "scales must be at least 2; got 1"),
        ({"draws": 15}, "draws must be at least source_length, 16; got 15"),
        ({"angles": 4}, "angles must be odd and at least 3; got 4"),
        ({"angle_scales": (-1.0,)}, "angle_scales must be one or more of at least 0"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        geometry.Config(**settings)
