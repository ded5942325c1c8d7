"""entropy_vs_dimension.py: its limits by other means, and the committed numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest
from command_lines import ROOT

from experiments.scores import entropy_vs_dimension as experiment


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
    assert sweep["raw"]["entropy"]["mean"][0] == sweep["scaled"]["entropy"]["mean"][0]
    raw, scaled = (np.array(quick["heatmaps"][arm]) for arm in ("raw", "scaled"))
    np.testing.assert_allclose(raw.sum(-1), 1, atol=3e-4)
    np.testing.assert_array_equal(raw[0], scaled[0])
    assert raw[-1].max(-1).min() > scaled[-1].max(-1).max()


def test_day_11s_entropy_is_nan_where_a_weight_is_too_small(quick):
    """At d_k = 512 some of ten weights fall below the smallest float: 0 log 0."""
    assert 0.05 < quick["day_11"]["nan_in_day_11_formula"] < 0.3
    assert math.isfinite(quick["day_11"]["raw"]["entropy"]["mean"])
    assert quick["sweeps"]["10"]["nan_in_day_11_formula"][0] == 0


def test_the_committed_numbers():
    numbers = json.loads((ROOT / "experiments/scores/entropy_vs_dimension.json").read_text())
    found = experiment.expectations(numbers)
    assert len(found) == 2 * (2 + 9) + 5 + 1 + 1
    assert [str(one) for one in found if not one.met] == []
    for sweep in numbers["sweeps"].values():
        assert np.all(np.diff(sweep["raw"]["entropy"]["mean"]) < 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": (16,)}, "dims must be at least two, rising"),
        ({"dims": (0, 16)}, "dims must be at least two, rising"),
        ({"keys": ()}, "keys must be at least one number of 2 or more"),
        ({"more_keys": (1, 4)}, "more_keys must be at least one number of 2 or more"),
        ({"samples": 1}, "samples must be at least 2; got 1"),
        ({"more_keys_dim": 0}, "more_keys_dim must be at least 1; got 0"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)
