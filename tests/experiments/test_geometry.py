"""geometry.py: its formulas against NumPy, and the committed numbers."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import SCORES, Score, attention_weights
from experiments.scores import geometry

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

COMMITTED = json.loads((EXPERIMENTS / "scores" / "geometry.json").read_text())


def test_committed_numbers():
    missed = [item for item in geometry.expectations(COMMITTED) if not item.met]
    assert not missed, missed
    assert set(geometry.plot(COMMITTED)) == set(geometry.CAPTIONS)
    assert list(COMMITTED["scales"]) == list(geometry.Config().scores)


def gap(name: str, scale: Any, dim: int) -> Any:
    """Returns g of the module docstring: the first logit minus each of the others."""
    return scale * (dim if name == "dot" else math.sqrt(dim))


def weights_by_formula(gaps: Any, source_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first weight and the Jacobian's norm where all other logits are `gaps` smaller.

    With a the first weight and b each of the others, the diagonal contributes a^2 (1 - a)^2 and
    S - 1 times b^2 (1 - b)^2 to |J|^2, and each pair contributes a^2 b^2 or b^4. 1 - a is computed
    as (S - 1) b, to avoid cancellation.
    """
    others = source_length - 1
    ratio = np.exp(-np.asarray(gaps, np.float64))
    first = 1 / (1 + others * ratio)
    b = ratio * first
    square = (first * others * b) ** 2 + others * (b * (1 - b)) ** 2
    square += 2 * others * (first * b) ** 2 + others * (others - 1) * b**4
    return first, np.sqrt(square)


@pytest.fixture(scope="module")
def draws():
    return jax.jit(lambda: geometry.draw(geometry.QUICK))()


@pytest.mark.parametrize("name", ["dot", "additive"])
def test_sweeps_at_few_draws(draws, name):
    scales = np.array([0.0, 0.5, 1e3])
    sweep = geometry.scale_sweep(geometry.QUICK, draws, name, jnp.asarray(scales, jnp.float32))
    largest, norm = (sweep[what]["mean"] for what in ("largest_weight", "jacobian_norm"))
    assert largest[0] == pytest.approx(1 / 7, abs=1e-6)
    if name == "dot":
        first, by_formula = weights_by_formula(gap(name, scales, 13), 7)
        np.testing.assert_allclose(largest, first, atol=1e-5)
        np.testing.assert_allclose(norm[:2], by_formula[:2], rtol=1e-4)
    else:
        limit = geometry.additive_limit(geometry.QUICK, draws)
        assert largest[-1] == pytest.approx(limit, abs=0.01)
        # The bound: no logit is larger than sum |v|.
        bound = np.abs(np.asarray(draws.params[name]["v"])).sum(axis=1).max()
        assert max(sweep["largest_weight"]["high"]) <= 1 / (1 + 6 * np.exp(-2 * bound))


def test_committed_sweeps_follow_the_formula():
    scales = np.array(COMMITTED["key_scales"])
    for name in ("dot", "scaled"):
        sweep = COMMITTED["scales"][name]
        first, by_formula = weights_by_formula(gap(name, scales, 32), 16)
        np.testing.assert_allclose(sweep["largest_weight"]["mean"], first, atol=1e-5)
        representable = by_formula > 1e-30  # float32 ends at 1e-38
        norm = np.array(sweep["jacobian_norm"]["mean"])
        np.testing.assert_allclose(norm[representable], by_formula[representable], rtol=1e-4)
    for sweep in COMMITTED["scales"].values():
        assert sweep["largest_weight"]["mean"][0] == pytest.approx(1 / 16, abs=1e-6)


@pytest.mark.parametrize("name", ["dot", "scaled", "general"])
def test_a_query_orthogonal_to_all_keys_attends_uniformly(draws, name):
    assert geometry._orthogonal_query(geometry.QUICK, draws, name) < 1e-4


@dataclasses.dataclass(frozen=True)
class Twice(Score):
    """Twice the dot product."""

    def pair(self, params, q_features, k_features):
        return 2 * q_features @ k_features.T


@pytest.mark.slow
def test_any_scores():
    own = "test_geometry:Twice"
    config = dataclasses.replace(geometry.QUICK, scores=("dot", own))
    numbers = geometry.run(config) | {"config": dataclasses.asdict(config)}
    assert [str(item) for item in geometry.expectations(numbers) if not item.met] == []
    scales = np.array(numbers["key_scales"])
    first, _ = weights_by_formula(2 * gap("dot", scales, 13), 7)
    np.testing.assert_allclose(numbers["scales"][own]["largest_weight"]["mean"], first, atol=1e-5)
    assert numbers["additive_limit"] is None
    assert f"| {own} |" in geometry.report(numbers)
    assert set(geometry.plot(numbers)) == set(geometry.CAPTIONS)


def test_general_of_a_rotation_is_scaled_dot(draws):
    """With W = R / sqrt(D) a query along R k_1 gives the formula's weights, rows of 1 + 6 keys."""
    rotation, basis = np.asarray(draws.bases[1]) / np.sqrt(13), np.asarray(draws.bases[0])
    params = {"kernel": jnp.asarray(rotation / np.sqrt(13), jnp.float32)}
    query, key = basis[:1] @ rotation.T, 0.3 * basis[:7]
    weights = attention_weights(
        jnp.asarray(query, jnp.float32), jnp.asarray(key), score="general", params=params
    )
    first, _ = weights_by_formula(gap("general", 0.3, 13), 7)
    np.testing.assert_allclose(weights[0, 0], first, rtol=1e-5)
    np.testing.assert_allclose(weights[0, 1:], (1 - first) / 6, rtol=1e-5)


@pytest.mark.parametrize("first_logit", [0.0, 1.0, 5.0])
def test_formula_against_the_materialised_jacobian(first_logit):
    logits = np.array([first_logit, 0, 0, 0, 0])
    weights = np.exp(logits) / np.exp(logits).sum()
    first, norm = weights_by_formula(first_logit, 5)
    np.testing.assert_allclose(first, weights[0], rtol=1e-14)
    jacobian = np.diag(weights) - np.outer(weights, weights)
    np.testing.assert_allclose(norm, np.linalg.norm(jacobian), rtol=1e-13)


def test_formula_far_out():
    """1 - a is 0 in float64: with b = e^-200 for the others, 4^2 + 4 + 2 * 4 squares of b."""
    _, norm = weights_by_formula(200.0, 5)
    np.testing.assert_allclose(norm, np.exp(-200) * np.sqrt(16 + 4 + 8), rtol=1e-12)


@pytest.mark.parametrize("name", SCORES)
def test_identical_keys(name):
    """Identical keys have weight 1 / S, and the query no gradient; different keys have both."""
    rngs = jax.random.split(jax.random.key(0), 4)
    query, token = jax.random.normal(rngs[0], (2, 10, 1, 13))
    other = jax.random.normal(rngs[1], (10, 7, 13))
    cotangent = jax.random.normal(rngs[2], (10, 1, 7))
    params = SCORES[name].init(rngs[3], 13, 13)

    @jax.jit
    def measure(key):
        weights, pull_back = jax.vjp(
            lambda query: attention_weights(query, key, score=name, params=params), query
        )
        return jnp.abs(weights - 1 / 7).max(), jnp.abs(pull_back(cotangent)[0]).max()

    from_uniform, dquery = measure(jnp.repeat(token, 7, axis=1))
    assert from_uniform < 1e-7
    assert dquery < 1e-5
    assert min(measure(other)) > 0.01


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_saturated_backward(draws, implementation):
    found = geometry.saturated(geometry.QUICK, draws, "scaled", implementation)
    assert found["not_finite"] == 0
    assert found["output_from_one_hot"] == 0
    assert found["share_of_unsaturated"] < 1e-6


def test_committed_saturated_outputs_are_one_hot():
    for name in geometry.DOT_LIKE:
        for found in COMMITTED["saturated"][name].values():
            assert found["output_from_one_hot"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": ()}, "scores must be at least one; got none"),
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
