"""local_attention.py: windows and Gaussian by hand, and the committed numbers."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.centers import monotonic_centers
from attention_jax.functional.local import window_mask
from attention_jax.scores import Score
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import TrainedRun
from experiments.reversal import local_attention as experiment
from experiments.reversal import local_attention_windows as windows

RESULTS = Path(__file__).parents[2] / "experiments" / "reversal"


@dataclasses.dataclass(frozen=True)
class Nearness(Score):
    """A user's own score."""

    def pair(self, params, q_features, k_features):
        return -jnp.abs(q_features[:, None] - k_features[None]).mean(-1)


@pytest.fixture(scope="module")
def committed():
    return json.loads((RESULTS / "local_attention.json").read_text())


def test_masks_are_those_of_the_chapter():
    source, target, radius = 20, 16, 3
    rng = np.random.default_rng(2)
    local_m, local_p = np.zeros((2, target, source), int)
    for i in range(target):
        p = int(i * source / target)
        local_m[i, max(0, p - radius) : min(source, p + radius + 1)] = 1
        p = int(np.clip(i * source / target + rng.normal(0, 2), 0, source - 1))
        local_p[i, max(0, p - radius) : min(source, p + radius + 1)] = 1
    found = windows.chapter_masks()
    assert found["pairs"]["local-m"] == local_m.tolist()
    assert found["pairs"]["local-p"] == local_p.tolist()
    assert np.sum(found["pairs"]["global"]) == source * target
    for i, row in enumerate(found["pairs"]["anti-diagonal"]):
        assert np.flatnonzero(row).tolist() == [
            j for j in range(source) if abs(j - (source - 1 - i)) <= radius
        ]
    # One row of the Gaussian by hand: uniform over the keys at most 3 away, then damped.
    center, row = found["gaussian_centers"][5], np.array(found["gaussian_weights"][5])
    keys = [j for j in range(source) if abs(j - center) <= radius]
    expected = [math.exp(-((j - center) ** 2) / (2 * 1.5**2)) / len(keys) for j in keys]
    np.testing.assert_allclose(row[keys], expected, atol=2e-5)
    assert row.sum() == pytest.approx(sum(expected), abs=1e-4)


def test_sums_under_a_gaussian_by_hand():
    assert windows.mass_on_a_key(1) == pytest.approx((1 + 2 * math.exp(-2)) / 3)
    x = (np.arange(100_000) + 0.5) / 100_000 * 2 - 1  # midpoints in [-1, 1]
    between = np.mean(np.exp(-2 * x**2))
    assert windows.mass_between_keys() == pytest.approx(between, rel=1e-8)
    assert windows.mass_on_a_key(1000) == pytest.approx(between, rel=1e-3)


def test_sums_under_a_gaussian_of_random_rows():
    found = windows.gaussian_mass(3, samples=1009)
    for place in ("on a key", "between keys"):
        of = found[place]
        assert abs(of["mean"] - of["formula"]) < 4 * of["standard_error"]
        assert 0 < of["standard_error"] < 0.02


@pytest.mark.parametrize("radius", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [3, 4, 7])
def test_ceiling_counts_letters_out_of_sight(length, radius):
    seen = np.asarray(
        jax.jit(
            lambda: window_mask(monotonic_centers(length), radius).materialize(length, length)
        )()
    )
    wanted = seen[np.arange(length), np.arange(length)[::-1]]
    expected = (1 / 26) ** (np.sum(~wanted) // 2)
    assert experiment.exact_match_ceiling(length, radius) == pytest.approx(expected)
    assert (expected == 1) == (length <= radius + 1)


def test_where_a_model_looks(monkeypatch):
    """Compares with loops over rows; the weights are random and do not sum to 1."""
    config = experiment.Config().training("scaled", "no encoder", "predicted", 2)
    random = np.random.default_rng(0).random((2, 1, 5, 9, 8)).astype(np.float32)
    seen = {}

    class Model:
        def __init__(self, weights):
            self.weights = weights

        def __call__(self, source, lengths, inputs, *, return_weights):
            seen["lengths"] = lengths
            return None, self.weights

    monkeypatch.setattr(Reversal, "bind", lambda _, weights: Model(weights))
    found = experiment._where_it_looks(TrainedRun(config, jnp.asarray(random), 0), 5)
    rows = [(b, i, int(n)) for b, n in enumerate(seen["lengths"]) for i in range(n)]
    for seed, weights in enumerate(random[:, 0].astype(np.float64)):
        sums = [weights[b, i].sum() for b, i, _ in rows]
        right = [weights[b, i, n - 1 - i] for b, i, n in rows]
        assert found["weight"][seed] == pytest.approx(np.mean(sums), rel=1e-4)
        assert found["on_the_letter"][seed] == pytest.approx(np.mean(right), rel=1e-4)


def test_every_arm_is_another_model():
    config = experiment.Config()
    models = [
        config.training("scaled", encoder, centers, radius).model
        for encoder, centers in experiment.ARMS
        for radius in config.radii_of(encoder, centers)
    ]
    assert len(set(models)) == len(models)
    assert {model.encoder_layers for model in models} == {0, 1}


def test_committed_numbers_meet_what_is_expected(committed):
    assert [str(one) for one in experiment.expectations(committed) if not one.met] == []
    assert list(experiment.plot(committed)) == list(experiment.CAPTIONS)
    assert np.shape(committed["ceiling"]["5"]) == (6,)
    for radius in committed["gaussian"]:
        for place in ("on a key", "between keys"):
            mass = radius[place]
            # Five digits are kept; one key alone, in a window of radius 1, has no sampling error.
            within = 4 * mass["standard_error"] + 1e-5
            assert abs(mass["mean"] - mass["formula"]) <= within


def test_the_report_has_the_numbers_of_the_arms(committed):
    text = experiment.report(committed)
    by_radius = committed["arms"]["scaled"]["no encoder, diagonal"]
    exact = [
        100 * np.mean(list(arm["accuracy"]["free_running_exact"].values()))
        for arm in by_radius.values()
    ]
    cells = " | ".join(f"{share:.1f}" for share in exact)
    assert f"| scaled | diagonal, no encoder | {cells} |" in text
    sums = [
        np.mean(a["weight"]) for a in committed["arms"]["scaled"]["no encoder, predicted"].values()
    ]
    assert f"rows keep {' / '.join(f'{share:.2f}' for share in sums)}" in text


@pytest.mark.parametrize(
    ("claim", "arm", "radius", "length", "exact"),
    [
        ("scaled, no encoder, predicted", "no encoder, predicted", "2", "4", -5.0),
        ("scaled, no encoder, D = 3", "no encoder, diagonal", "3", "8", 5.0),
        ("scaled, no encoder, anti-diagonal: ", "no encoder, anti-diagonal", "5", "8", 2.0),
        ("scaled, no encoder, anti-diagonal, D = 0", "no encoder, anti-diagonal", "0", "5", 0.1),
        (
            "scaled, no encoder, diagonal, D = 2: exact match up to",
            "no encoder, diagonal",
            "2",
            "3",
            0.5,
        ),
        (
            "scaled, no encoder, diagonal, D = 2: exact match from",
            "no encoder, diagonal",
            "2",
            "6",
            0.5,
        ),
        ("scaled, encoder, diagonal, D = 0", "encoder, diagonal", "0", "3", -5.0),
    ],
)
def test_other_numbers_do_not(committed, claim, arm, radius, length, exact):
    changed = copy.deepcopy(committed)
    seeds = changed["config"]["seeds"]
    changed["arms"]["scaled"][arm][radius]["accuracy"]["free_running_exact"][length] = [
        exact
    ] * seeds
    (found,) = [one for one in experiment.expectations(changed) if one.claim.startswith(claim)]
    assert not found.met


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"radii": ()}, "radii must be at least 0, each larger than the last"),
        ({"radii": (2, 1)}, "radii must be at least 0, each larger than the last"),
        ({"encoder_radii": (-1, 2)}, "encoder_radii must be at least 0"),
        ({"encoder_radii": (0, 4)}, "share a radius of at least 1"),
        ({"samples": 1}, "samples must be at least 2; got 1"),
        ({"strings": 0}, "strings must be at least 1; got 0"),
        ({"seeds": 0}, "seeds must be at least 1; got 0"),
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"scores": ("scaled", "dott")}, "score must be one of .*; did you mean 'dot'"),
        ({"dim": 7}, "dim must be .*; got 7"),
        ({"num_heads": 5}, "dim must be a multiple of 5 heads; got 64"),
        ({"learning_rate": 0.0}, "learning_rate must be greater than 0; got 0.0"),
        ({"word": ""}, "word must have 1 or more letters; got"),
        ({"workdir": Path(__file__)}, "workdir"),
    ],
)
def test_mistakes_before_anything_is_trained(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)


def test_two_scores_each_get_rows_curves_and_claims(committed, tmp_path):
    """The numbers stand for a run with a user's own score; a run is the next test."""
    both = copy.deepcopy(committed)
    both["arms"]["mine:Nearness"] = copy.deepcopy(both["arms"]["scaled"])
    assert "| mine:Nearness | anti-diagonal, encoder |" in experiment.report(both)
    claims = [one.claim for one in experiment.expectations(both)]
    assert sum(claim.startswith("mine:Nearness, ") for claim in claims) == len(claims) / 2
    assert len(experiment.plot(both)["local_attention"].axes) == 6


@pytest.mark.slow
def test_a_run_with_two_scores(tmp_path, monkeypatch):
    arms = (("no encoder", "predicted"), ("encoder", "diagonal"))
    monkeypatch.setattr(experiment, "ARMS", arms)
    scores = ("scaled", f"{__name__}:Nearness")
    config = dataclasses.replace(
        experiment.QUICK, scores=scores, steps=2, strings=3, word="abc", dim=8, batch_size=2,
        workdir=tmp_path / "runs",
    )  # fmt: skip
    numbers = json.loads(json.dumps(experiment.run(config)))
    assert tuple(numbers["arms"]) == scores
    for by_arm in numbers["arms"].values():
        predicted, diagonal = (by_arm[", ".join(arm)]["2"] for arm in arms)
        assert np.shape(predicted["accuracy"]["free_running_exact"]["8"]) == (2,)
        assert np.shape(predicted["weight"]) == np.shape(predicted["on_the_letter"]) == (2,)
        np.testing.assert_allclose(np.sum(diagonal["weights"], -1), 1, atol=1e-3)
