"""score_variance.py: its formulas against NumPy samples, and the committed numbers."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import Score
from experiments.scores import score_variance
from experiments.scores.score_variance_formulas import additive_row_variance, variances_by_formula

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

COMMITTED = json.loads((EXPERIMENTS / "scores" / "score_variance.json").read_text())


def test_committed_numbers():
    missed = [item for item in score_variance.expectations(COMMITTED) if not item.met]
    assert not missed, missed
    assert list(COMMITTED["source_deviations"]) == ["4", "16", "64", "256", "1024"]


def test_it_runs_and_draws():
    config = dataclasses.replace(score_variance.QUICK, dims=(16,), samples=500, draws=4)
    numbers = score_variance.run(config)
    numbers["config"] = dataclasses.asdict(config)
    missed = [item for item in score_variance.expectations(numbers) if not item.met]
    assert not missed, missed
    assert set(score_variance.plot(numbers)) == set(score_variance.CAPTIONS)
    for name in ("dot", "scaled"):
        weights = np.array(numbers["heatmaps"][name]["weights"])
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=0.01)
    heatmaps = numbers["heatmaps"]  # of 64 features
    ratio = heatmaps["dot"]["variance"] / heatmaps["scaled"]["variance"]
    assert ratio == pytest.approx(64, abs=0.01)


@dataclasses.dataclass(frozen=True)
class Shifted(Score):
    """Twice the dot product plus 5: a score whose logits have a mean."""

    def pair(self, params, q_features, k_features):
        return 2 * q_features @ k_features.T + 5


def test_any_scores():
    own = "test_score_variance:Shifted"
    config = dataclasses.replace(
        score_variance.QUICK, dims=(16,), samples=500, draws=4, scores=("additive", own)
    )
    numbers = score_variance.run(config) | {"config": dataclasses.asdict(config)}
    assert [str(item) for item in score_variance.expectations(numbers) if not item.met] == []
    (measured,) = numbers["initial"][own]
    for where in ("pairs", "row"):  # 4 D, without the square of the mean
        within = 4 * measured[where]["standard_error"]
        assert measured[where]["mean"] == pytest.approx(4 * 16, abs=within)
    assert f"| {own} | " in score_variance.report(numbers)
    assert set(score_variance.plot(numbers)) == set(score_variance.CAPTIONS)


def sampled(query_mean, key_mean, deviations, normalise, rows=4000, length=40):
    """Variance over all pairs and within a row, in float64 NumPy."""
    rng = np.random.default_rng(0)
    dim = len(query_mean)
    query = normalise(query_mean + deviations[0] * rng.normal(size=(rows, dim)))
    key = normalise(key_mean + deviations[1] * rng.normal(size=(rows, length, dim)))
    logits = np.einsum("rd,rld->rl", query, key) / np.sqrt(dim)
    return logits[:, 0].var(), logits.var(axis=1, ddof=1).mean()


def rms(tokens):
    return tokens / np.sqrt(np.mean(tokens**2, axis=-1, keepdims=True))


def layer(tokens):
    return rms(tokens - tokens.mean(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("normalisation", "normalise"), [("none", np.asarray), ("rms", rms), ("layer", layer)]
)
@pytest.mark.parametrize("means", ["same", "own"])
def test_formula(means, normalisation, normalise):
    dim, deviations = 64, (0.8, 1.3)
    pattern = np.random.default_rng(1).normal(size=dim)
    query_mean, key_mean = {
        "same": (np.full(dim, 0.7), np.full(dim, -1.1)),
        "own": (pattern, pattern + 0.5),  # not at right angles
    }[means]
    got = variances_by_formula((query_mean, key_mean), deviations, normalisation)
    pairs, row = sampled(query_mean, key_mean, deviations, normalise)
    # 4000 pairs: 4 sqrt(2 / 4000) = 9 %; rows have 40 times as many. And 3 / D for the limit.
    np.testing.assert_allclose(got["pairs"], pairs, rtol=0.1)
    np.testing.assert_allclose(got["row"], row, rtol=0.05)


def test_exercise_38_2():
    """Means 2 and -1, variances 1 and 1/4: 1/4 + 1 + 1 = 2.25, one 1 for the keys only."""
    means = (np.full(3, 2.0), np.full(3, -1.0))
    got = variances_by_formula(means, (1.0, 0.5), "none")
    assert got == {"pairs": 2.25, "row": 1.25}


def test_normalisations():
    tokens = np.random.default_rng(2).normal(3, 2, size=(5, 7)).astype(np.float32)
    for name, function in (("none", np.asarray), ("rms", rms), ("layer", layer)):
        got = score_variance.normalised(jnp.asarray(tokens), name)
        np.testing.assert_allclose(got, function(tokens), rtol=1e-4, atol=1e-4)


def test_additive_row_variance():
    """Compares quadrature with samples: one a per query, and the b of many keys."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, np.sqrt(0.5), size=(4000, 1)), rng.normal(0, np.sqrt(0.5), (4000, 50))
    tanh = np.tanh(a + b)
    share = tanh.var(axis=1, ddof=1).mean() / np.mean(tanh**2)
    np.testing.assert_allclose(additive_row_variance(), share, rtol=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"dims": ()}, "dims must be at least one; got none"),
        ({"dims": (4, 0)}, "dims must be at least 1; got 0"),
        ({"samples": 127}, "samples must be at least 128; got 127"),
        ({"draws": 1}, "draws must be at least 2; got 1"),
        ({"initialisations": 1}, "initialisations must be at least 2; got 1"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        score_variance.Config(**settings)
