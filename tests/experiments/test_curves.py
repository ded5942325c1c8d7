"""curves.py: bars and bands stay within the possible range, and no curve hides another."""

import numpy as np
import pytest

from attention_jax.reports import plotting
from experiments.reversal.curves import accuracy_by_length, draw_band, draw_shares

SHARES = np.array([[0.9, 1.0, 1.0], [0.0, 0.0, 0.2], [0.5, 0.5, 0.5]])
MEAN, DEVIATION = SHARES.mean(-1), SHARES.std(-1, ddof=1)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_bars_stay_within_the_range_of_shares(scale):
    _, (axes,) = plotting.new_figure(2, 2)
    axes.set_xscale(scale)
    for index in range(2):
        draw_shares(axes, [10, 20, 50], SHARES, index=index, count=2, label=str(index))
    places = []
    for container in axes.containers:
        points, _, (bars,) = container
        np.testing.assert_allclose(points.get_ydata(), MEAN)
        assert points.get_linestyle() == "None"
        places.append(points.get_xdata())
        low, high = np.array([segment[:, 1] for segment in bars.get_segments()]).T
        np.testing.assert_allclose(low, np.maximum(MEAN - DEVIATION, 0), atol=1e-12)
        np.testing.assert_allclose(high, np.minimum(MEAN + DEVIATION, 1), atol=1e-12)
    assert np.all(places[0] < [10, 20, 50])
    assert np.all(places[1] > [10, 20, 50])


def test_bands_stay_within_their_range():
    _, (axes,) = plotting.new_figure(2, 2)
    draw_band(axes, [1, 2, 3], SHARES, index=0, label="a", most=1)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == 0
    assert heights.max() == 1


def test_accuracies_join_successive_lengths_only_and_bars_stay_within_0_and_1():
    panels = {"masked": {"dot": {3: [0.9, 1.0], 4: [0.2, 0.2], 10: [0.0, 0.3]}}}
    (axes,) = accuracy_by_length(panels, ylabel="share", indices={"dot": 2}).axes
    points, *lines = axes.lines
    assert points.get_linestyle() == "None"
    assert [line.get_xdata().tolist() for line in lines] == [[3, 4], [10]]
    assert {line.get_color() for line in axes.lines} == {plotting.COLORS[2]}
    bars = [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()]
    deviations = [0.1 / 2**0.5, 0, 0.3 / 2**0.5]
    expected = [[0.95 - deviations[0], 1.0], [0.2, 0.2], [0.0, 0.15 + deviations[2]]]
    np.testing.assert_allclose(bars, expected, atol=1e-12)
