"""rollout.py: its means by hand, a tiny run with two scores, and the committed numbers."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.scores import Score
from experiments.experiment import conduct
from experiments.reversal import rollout

RESULTS = Path(__file__).parents[2] / "experiments" / "reversal"


@dataclasses.dataclass(frozen=True)
class Nearness(Score):
    """A user's own score."""

    def pair(self, params, q_features, k_features):
        return -jnp.abs(q_features[:, None] - k_features[None]).mean(-1)


def small(tmp_path, **settings):
    config = rollout.Config(steps=2, strings=3, word="abc", workdir=tmp_path / "runs")
    return dataclasses.replace(config, **settings)


@pytest.mark.slow
def test_a_run_with_two_scores(tmp_path):
    scores = ("additive(hidden_dim=8)", f"{__name__}:Nearness")
    config = small(
        tmp_path, scores=scores, seeds=1, encoder_layers=2, num_heads=2, dim=8, batch_size=2
    )
    conduct(rollout, config, tmp_path)
    numbers = json.loads((tmp_path / "rollout.json").read_text())
    assert tuple(numbers["scores"]) == scores
    for measured in numbers["scores"].values():
        assert np.shape(measured["sharpness"]) == np.shape(measured["spread"]) == (1, 2, 2)
        assert np.shape(measured["own_letter"]) == (1, 2)
        assert np.shape(measured["exact_match"]) == (1,)
    word = {name: np.array(value)[0] for name, value in numbers["word"].items()}
    assert word["encoder"].shape == (2, 2, 3, 3)
    # The rollout of the drawn word, by hand; the numbers have three decimals.
    first, second = (0.5 * layer.mean(0) + 0.5 * np.eye(3) for layer in word["encoder"])
    np.testing.assert_allclose(word["rollouts"][1], second @ first, atol=2e-3)
    np.testing.assert_allclose(word["cross_rollout"], word["cross"] @ second @ first, atol=2e-3)
    for name in ("rollouts", "cross_rollout"):
        np.testing.assert_allclose(word[name].sum(-1), 1, atol=2e-3)
    assert list(rollout.plot(numbers)) == list(rollout.CAPTIONS)
    report = rollout.report(numbers)
    assert "| of 4 heads align |" in report
    assert [f"| {score} | 0 |" in report for score in scores] == [True, True]


def test_heads_that_align_and_heads_that_spread_are_counted():
    uniform, diagonal = np.full((3, 3), 1 / 3), np.eye(3)
    attention = {
        "encoder": np.stack([uniform, diagonal])[None, None, None],  # one seed, string and layer
        "rollouts": (0.5 * np.eye(3) + 0.25 * (uniform + diagonal))[None, None, None],
        "cross": diagonal[::-1][None, None],
        "cross_rollout": uniform[None, None],
    }
    means = rollout._means({name: jnp.asarray(array) for name, array in attention.items()}, 3)
    np.testing.assert_allclose(means["sharpness"], [[[1 / 3, 1.0]]], atol=1e-3)
    np.testing.assert_allclose(means["spread"], [[[1.0, 0.0]]], atol=1e-3)
    np.testing.assert_allclose(means["own_letter"], [[0.5 + 0.25 + 0.25 / 3]], atol=1e-3)
    assert means["cross_on_the_letter"] == [1.0]
    np.testing.assert_allclose(means["cross_rollout_on_the_letter"], [1 / 3], atol=1e-3)
    config = {"encoder_layers": 1, "num_heads": 2, "word": "abc", "strings": 1}
    numbers = {"config": config, "scores": {"mine": {**means, "exact_match": [0.5]}}}
    assert "| mine | 0 | 1 | 1 | 83 | 100 | 33 | 50 |" in rollout.report(numbers)


def test_committed_rollouts_are_shares():
    numbers = json.loads((RESULTS / "rollout.json").read_text())
    assert len(numbers["scores"]["scaled"]["exact_match"]) >= 3
    for name in ("rollouts", "cross_rollout"):
        rows = np.sum(numbers["word"][name], -1)
        np.testing.assert_allclose(rows, 1, atol=8 * 5e-4 + 1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"word": "a"}, "word must have 2 or more letters; got 'a'"),
        ({"num_heads": 5}, "dim must be a multiple of 5 heads; got 64"),
        ({"strings": 0}, "strings must be at least 1; got 0"),
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"scores": ("scaled", "dott")}, "score must be one of .*; did you mean 'dot'"),
        ({"learning_rate": 0.0}, "learning_rate must be greater than 0; got 0.0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ],
)
def test_mistakes_before_anything_is_trained(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small(tmp_path, **settings)
