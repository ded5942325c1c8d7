"""The figure of a sweep: every seed has a point, and axes show what a metric can be."""

import itertools

import numpy as np
import pytest

from attention_jax.reports.plotting import COLORS, save
from attention_jax.reports.setting_figure import results_by_setting
from attention_jax.training.task import Result

SCORES = [f"score {index}" for index in range(8)]
SETTINGS = [f"dim {dim}\nlearning_rate {rate}" for dim in (16, 128) for rate in (1, 2)]


def panels(scores, settings, seeds=3):
    rng = np.random.default_rng(0)
    pairs = list(itertools.product(scores, settings))
    shares = {pair: Result(rng.uniform(0, 100, seeds).tolist(), True, 0.0, 100.0) for pair in pairs}
    losses = {pair: Result(np.exp(3 * rng.normal(size=seeds)).tolist(), False) for pair in pairs}
    return {"exact match (%)": shares, "loss": losses}


def points_of(axes):
    lines = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    return lines, [float(x) for line in lines for x in line.get_xdata()]


@pytest.mark.parametrize("scores", [["dot"], ["scaled", "mine", "dot"]])
def test_a_score_of_the_papers_has_one_color(scores):
    axes = results_by_setting(panels(scores, SETTINGS[:1])).axes[0]
    colors = [line.get_color() for line in points_of(axes)[0]]
    assert colors[-1] == COLORS[1]
    assert colors[1:-1] == [COLORS[4]] * (len(scores) > 1)  # that of no score of the papers


@pytest.mark.parametrize(
    ("losses", "scale"),
    [
        ([1.0, 19.0], "linear"), ([1.0, 21.0], "log"), ([np.nan, 1.0, 21.0], "log"),
        ([0.0, 21.0], "linear"), ([-1.0, 21.0], "linear"), ([1.0, np.inf, 19.0], "linear"),
        ([np.nan], "linear"),
    ],
)  # fmt: skip
def test_many_magnitudes_have_a_logarithmic_axis(losses, scale):
    (axes,) = results_by_setting({"loss": {("dot", "b"): Result(losses, False)}}).axes
    assert axes.get_xscale() == scale


@pytest.mark.parametrize("counts", [(2, 1), (8, 4)])
def test_a_point_per_seed(counts, tmp_path):
    made = panels(SCORES[: counts[0]], SETTINGS[: counts[1]])
    figure = results_by_setting(made)
    for axes, panel in zip(figure.axes, made.values(), strict=True):
        lines, numbers = points_of(axes)
        assert sorted(numbers) == sorted(x for result in panel.values() for x in result.by_seed)
        places = [float(y) for line in lines for y in line.get_ydata()]
        assert len(set(places)) == len(places)
        # A line at the mean, as wide as the points of its score, beside those of the others.
        at_means = [line for line in axes.get_lines() if line.get_color() != "0.85"][1::2]
        means = [[np.mean(result.by_seed)] * 2 for result in panel.values()]
        np.testing.assert_allclose([line.get_xdata() for line in at_means], means)
        for line, points in zip(at_means, lines, strict=True):
            (low, high), middle = line.get_ydata(), np.mean(points.get_ydata())
            assert low < min(points.get_ydata()) < middle < max(points.get_ydata()) < high
            assert middle == pytest.approx((low + high) / 2)
        ends = sorted(float(y) for line in at_means for y in line.get_ydata())
        assert (ends[0] > -0.5, ends[-1] < counts[1] - 0.5) == (True, True)
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == counts[0]
    shares, losses = figure.axes
    assert losses.get_xscale() == "log"
    assert (-10 < shares.get_xlim()[0] <= 0, 100 <= shares.get_xlim()[1] < 110) == (True, True)
    assert save(figure, tmp_path / "figure.png").stat().st_size > 0
    # Nothing overlaps: not the labels of the settings, and not the legend and the axes.
    renderer = figure.canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in shares.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(boxes))
    (legend,) = figure.legends
    assert legend.get_window_extent(renderer).y0 >= shares.get_window_extent().y1
    assert legend.get_window_extent(renderer).width <= figure.bbox.width
