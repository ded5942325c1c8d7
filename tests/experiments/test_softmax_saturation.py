"""softmax_saturation.py: its closed forms, and the committed numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest
from command_lines import ROOT

from experiments.scores import softmax_saturation as experiment


def largest_weight(scores):
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum())[-1]


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.8, 20.0])
def test_the_norm_in_closed_form_against_differences(scale):
    keys, step = 7, 1e-6
    scores = scale * np.linspace(-1, 1, keys)
    gradient = [
        (largest_weight(scores + step * unit) - largest_weight(scores - step * unit)) / (2 * step)
        for unit in np.eye(keys)
    ]
    np.testing.assert_allclose(
        experiment.even_norm(keys, scale), np.linalg.norm(gradient), rtol=1e-6
    )


@pytest.mark.parametrize("keys", [16, 31])
def test_the_peak_in_closed_form_against_a_search(keys):
    scales = np.arange(0.1, 20, 1e-3)
    norms = [experiment.even_norm(keys, scale) for scale in scales]
    assert experiment.even_peak(keys) == pytest.approx(scales[np.argmax(norms)], abs=2e-3)


def test_the_deviation_of_even_scores():
    keys = 16
    stated = math.sqrt((keys + 1) / (3 * (keys - 1)))
    assert np.std(np.linspace(-1, 1, keys)) == pytest.approx(stated)


@pytest.fixture(scope="module")
def quick():
    config = dataclasses.replace(experiment.QUICK, scales=20)
    numbers = experiment.run(config) | {"config": dataclasses.asdict(config)}
    return json.loads(json.dumps(numbers, default=str))


def test_a_quick_run_meets_what_is_expected(quick):
    assert [str(one) for one in experiment.expectations(quick) if not one.met] == []
    assert set(experiment.plot(quick)) == set(experiment.CAPTIONS)
    # At scale 0.1 each row is all but uniform: J e_1 = (e_1 - 1/16) / 16, of norm sqrt(15)/64.
    assert quick["random"]["mean"][0] == pytest.approx(math.sqrt(15) / 64, rel=0.25)
    expected = [experiment.even_norm(16, scale) for scale in quick["scales"]]
    np.testing.assert_allclose(quick["even"]["gradient_norm"], expected, atol=2e-6)
    for of_dim in quick["curves"]:
        for arm in ("raw", "scaled"):
            assert sum(of_dim[arm]["mean"]) == pytest.approx(1, abs=1e-4)


def test_the_chapters_reading_is_not_met(quick):
    """The bounds exclude a peak at 1, and a norm of 0 at 10."""
    peak, _, at_ten, *_ = experiment.expectations(quick)
    assert not peak.low <= 1 <= peak.high
    assert at_ten.low > 0.5
    assert peak.verdict == at_ten.verdict == "contradicted"
    text = experiment.report(quick)
    assert f"The curve peaks at {quick['even']['peak_scale']:.2f}." in text
    assert (
        f"{100 * experiment.even_norm(16, 10) / experiment.even_norm(16, 5.87):.0f} % at scale 10"
        in text
    )


def test_the_committed_numbers():
    numbers = json.loads((ROOT / "experiments/scores/softmax_saturation.json").read_text())
    found = experiment.expectations(numbers)
    assert len(found) == 1 + 3 + 1 + 3 + 3 + 1
    assert [str(one) for one in found if not one.met] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keys": 2}, "keys must be at least 3; got 2"),
        ({"scales": 3}, "scales must be at least 20; got 3"),
        ({"samples": 1}, "samples must be at least 2; got 1"),
        ({"largest_scale": 5.0}, "largest_scale must be at least 10; got 5"),
        ({"largest_scale": math.inf}, "largest_scale must be at least 10; got inf"),
        ({"curve_dims": (64, 16)}, "curve_dims must be at least two, rising"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment.Config(), **settings)
