"""The figure of a sweep: every seed has a point, and axes show what a metric can be."""

import itertools

import numpy as np
import pytest

from attention_jax.reports.plotting import save
from attention_jax.reports.setting_figure import Panel, results_by_setting

SCORES = [f"score {index}" for index in range(8)]
SETTINGS = [f"dim {dim}\nlearning_rate {rate}" for dim in (16, 32, 64, 128) for rate in (1, 2, 3)]


def panels(scores, settings, seeds=3):
    rng = np.random.default_rng(0)
    pairs = list(itertools.product(scores, settings))
    shares = {pair: rng.uniform(0, 100, seeds).tolist() for pair in pairs}
    losses = {pair: np.exp(3 * rng.normal(size=seeds)).tolist() for pair in pairs}
    return [Panel("exact match (%)", shares, 0.0, 100.0), Panel("loss", losses)]


def points_of(axes):
    lines = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    return lines, [float(y) for line in lines for y in line.get_ydata()]


@pytest.mark.parametrize("counts", [(2, 1), (8, 12)])
def test_a_point_per_seed_side_by_side(counts, tmp_path):
    made = panels(SCORES[: counts[0]], SETTINGS[: counts[1]])
    figure = results_by_setting(made)
    for axes, panel in zip(figure.axes, made, strict=True):
        lines, heights = points_of(axes)
        assert sorted(heights) == sorted(itertools.chain(*panel.by_seed.values()))
        places = [float(x) for line in lines for x in line.get_xdata()]
        assert len(set(places)) == len(places)
        styles = {(line.get_color(), line.get_marker()) for line in lines}
        assert len(styles) == counts[0]
    shares, losses = figure.axes
    assert losses.get_yscale() == "log"
    assert (-10 < shares.get_ylim()[0] <= 0, 100 <= shares.get_ylim()[1] < 110) == (True, True)
    assert save(figure, tmp_path / "figure.png").stat().st_size > 0
    # Nothing overlaps: not the labels of the settings, and not the legend and the axes.
    renderer = figure.canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in figure.axes[-1].get_xticklabels()]
    assert all(a.x1 <= b.x0 for a, b in itertools.pairwise(boxes))
    (legend,) = figure.legends
    assert legend.get_window_extent(renderer).y0 >= figure.axes[0].get_window_extent().y1
    assert legend.get_window_extent(renderer).width <= figure.bbox.width


def test_diverged_and_missing_runs_have_no_point(tmp_path):
    by_seed = {("dot", "dim 4"): [1.0, np.nan], ("scaled", "dim 8"): [np.nan, np.nan]}
    figure = results_by_setting([Panel("loss", by_seed)])
    _, heights = points_of(figure.axes[0])
    assert [height for height in heights if np.isfinite(height)] == [1.0]
    save(figure, tmp_path / "figure.png")


def test_long_labels_are_broken(tmp_path):
    settings = ["positions sinusoidal anchor=end draw=window limit=8192", "positions rotary"]
    figure = results_by_setting(panels(["dot"], settings))
    save(figure, tmp_path / "figure.png")
    label = figure.axes[-1].get_xticklabels()[0].get_text()
    assert label.split() == settings[0].split()
    assert max(map(len, label.split("\n"))) <= 26
