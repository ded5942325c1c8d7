"""entropy_vs_dimension.py: its limits by other means, and the committed numbers."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import ROOT

from attention_jax import Score
from experiments.scores import entropy_vs_dimension as experiment
from experiments.scores.entropy_vs_dimension_slopes import differences, slope_expectations, slopes


def test_the_expected_maximum():
    # David and Nagaraja, "Order Statistics": 1/sqrt(pi) of two, 3/(2 sqrt(pi)) of three.
    assert experiment.expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-9)
    assert experiment.expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-9)
    drawn = np.random.default_rng(0).normal(size=(40_000, 16)).max(1)
    assert experiment.expected_maximum(16) == pytest.approx(drawn.mean(), abs=5 * drawn.std() / 200)


def test_the_density_of_a_gap_at_zero_is_the_expected_maximum():
    two = np.sort(np.random.default_rng(1).normal(size=(200_000, 7)), axis=1)[:, -2:]
    gaps, width = np.diff(two)[:, 0], 0.02
    density = np.mean(gaps < width) / width
    # Of 200,000 gaps about 1.35 * 0.02 fall below it: 4 standard errors, and the slope.
    assert density == pytest.approx(experiment.expected_maximum(7), rel=0.06 + width)


def test_the_mean_inverse_norm():
    assert experiment.mean_inverse_norm(2) == pytest.approx(math.sqrt(math.pi / 2))
    assert experiment.mean_inverse_norm(4096) == pytest.approx(1 / 64, rel=1e-3)


def entropies(sigma, keys, rows, seed):
    logits = sigma * np.random.default_rng(seed).normal(size=(rows, keys))
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return -np.sum(weights * np.log(np.maximum(weights, 1e-300)), axis=1)


def test_the_limit_of_scaled_entropy():
    keys = 256
    drawn = entropies(1.0, keys, 4000, seed=2)
    within = 4 * drawn.std() / math.sqrt(len(drawn)) + experiment.second_order(keys)
    assert within < 0.01  # half a nat stands out
    assert experiment.scaled_entropy_limit(keys) == pytest.approx(drawn.mean(), abs=within)


def test_the_limit_of_raw_entropy():
    drawn = entropies(64.0, 16, 40_000, seed=3)
    limit = experiment.raw_entropy_limit(64**2, 16)
    assert limit == pytest.approx(drawn.mean(), rel=4 * drawn.std() / 200 / limit + 2 / 64)


@pytest.fixture(scope="module")
def quick():
    # The sizes of day 11 also in both sweeps: two programs for all samples.
    dim, keys = experiment.DAY_11_DIM, (experiment.DAY_11_KEYS,)
    config = dataclasses.replace(
        experiment.QUICK, dims=(1, dim), keys=keys, more_keys=keys, more_keys_dim=dim
    )
    numbers = experiment.run(config) | {"config": dataclasses.asdict(config)}
    return json.loads(json.dumps(numbers, default=str))


def test_a_quick_run_meets_what_is_expected(quick):
    assert [str(one) for one in experiment.expectations(quick) if not one.met] == []
    assert set(experiment.plot(quick)) == set(experiment.CAPTIONS)
    sweep = quick["sweeps"]["10"]
    # With one component the scale is 1.
    assert sweep["dot"]["entropy"]["mean"][0] == sweep["scaled"]["entropy"]["mean"][0]
    raw, scaled = (np.array(quick["heatmaps"][score]) for score in ("dot", "scaled"))
    np.testing.assert_allclose(raw.sum(-1), 1, atol=3e-3)
    np.testing.assert_array_equal(raw[0], scaled[0])
    assert raw[-1].max(-1).min() > scaled[-1].max(-1).max()


def test_day_11s_entropy_is_nan_where_a_weight_is_too_small(quick):
    """At d_k = 512 some of ten weights fall below the smallest float: 0 log 0."""
    day_11 = quick["day_11"]
    assert 0.05 < day_11["dot"]["nan_in_formula"] < 0.3
    assert math.isfinite(day_11["dot"]["entropy"]["mean"])
    assert day_11["scaled"]["nan_in_formula"] == 0
    assert f"is NaN in {100 * day_11['dot']['nan_in_formula']:.0f} %" in experiment.report(quick)


def test_the_fall_of_entropy_in_nats_and_as_a_share():
    """Lines of known slope: 3 nats per doubling for two keys, 5 for 32, and noise of its groups."""
    dims = [2, 4, 8, 16, 32]
    noise = np.random.default_rng(4).normal(0, 0.01, size=(2, 10))
    sweeps = {
        keys: {"dot": {"entropy_by_group": [list(100 - (fall + of_keys) * n) for n in range(5)]}}
        for keys, fall, of_keys in (("2", 3, noise[0]), ("32", 5, noise[1]))
    }
    numbers = {"config": {"dims": dims, "keys": [2, 32], "scores": ["dot"]}, "sweeps": sweeps}
    np.testing.assert_allclose(slopes(numbers, 2), 3 + noise[0])
    (nats, half), (share, _) = differences(numbers).values()
    assert nats == pytest.approx(2 + noise[1].mean() - noise[0].mean())
    assert half == pytest.approx(2.262 * np.sqrt(noise.var(1, ddof=1).sum() / 10))
    of_shares = (5 + noise[1].mean()) / math.log(32) - (3 + noise[0].mean()) / math.log(2)
    assert share == pytest.approx(of_shares)
    faster, as_share = slope_expectations(numbers)
    assert faster.verdict == "reproduced"
    assert as_share.verdict == "MISS"


@dataclasses.dataclass(frozen=True)
class Flat(Score):
    """A score that ignores its inputs: attention is uniform."""

    def pair(self, params, q_features, k_features):
        return jnp.zeros((q_features.shape[0], k_features.shape[0]))


@pytest.mark.slow
def test_any_scores():
    own = "test_entropy_vs_dimension:Flat"
    # Two programs, one of them also for day 11.
    dim, keys = experiment.DAY_11_DIM, experiment.DAY_11_KEYS
    config = dataclasses.replace(
        experiment.QUICK, dims=(4, dim), keys=(keys,), more_keys=(keys,), more_keys_dim=dim,
        samples=50, scores=("general", own),
    )  # fmt: skip
    numbers = experiment.run(config) | {"config": dataclasses.asdict(config)}
    assert experiment.expectations(numbers) == []
    sweep = numbers["sweeps"][str(keys)]
    np.testing.assert_allclose(sweep[own]["entropy"]["mean"], math.log(keys), 1e-6)
    np.testing.assert_allclose(sweep[own]["max_weight"]["high"], 1 / keys, 1e-5)
    assert all(0.5 < mean < 2.2 for mean in sweep["general"]["entropy"]["mean"])
    assert f"| {own} |" in experiment.report(numbers)
    assert set(experiment.plot(numbers)) == set(experiment.CAPTIONS)


def test_the_committed_numbers():
    numbers = json.loads((ROOT / "experiments/scores/entropy_vs_dimension.json").read_text())
    found = experiment.expectations(numbers)
    assert len(found) == 2 * (3 + 9 + 1) + 5 + 2 + 1 + 1
    for sweep in numbers["sweeps"].values():
        assert np.all(np.diff(sweep["dot"]["entropy"]["mean"]) < 0)
        grouped = np.mean(sweep["dot"]["entropy_by_group"], axis=1)
        np.testing.assert_allclose(grouped, sweep["dot"]["entropy"]["mean"], atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": (16,)}, "dims must be at least two, rising"),
        ({"dims": (0, 16)}, "dims must be at least two, rising"),
        ({"keys": ()}, "keys must be at least one number of 2 or more"),
        ({"more_keys": (1, 4)}, "more_keys must be at least one number of 2 or more"),
        ({"samples": 19}, "samples must be at least 20; got 19"),
        ({"scores": ()}, "scores must be at least one; got none"),
        ({"more_keys_dim": 0}, "more_keys_dim must be at least 1; got 0"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)
