"""Figures show the numbers they are given."""

import re

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from attention_jax.reports.setting_figure import results_by_setting
from attention_jax.training.task import Result


def test_heatmaps_show_weights_between_zero_and_one_with_letters_on_the_axes():
    weights = np.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    figure = plotting.weight_heatmaps({"dot": (weights, ["b", "EOS"], ["a", "b", "c"])})
    axes = figure.axes[0]
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), weights)
    assert image.get_clim() == (0, 1)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "EOS"]
    assert axes.get_title() == "dot"


@pytest.mark.parametrize(
    "gradients", [[[-1.0, 3.0]], [[-3.0, -1.0]], [[0.5, 3.0]], [[np.nan, -3.0]]]
)
def test_gradients_are_white_at_zero(gradients):
    _, (axes,) = plotting.new_figure(2, 1)
    image = plotting.draw_gradients(axes, np.array(gradients), ["a"], ["b", "EOS"])
    np.testing.assert_array_equal(image.get_array().mask, np.isnan(gradients))  # empty cells
    assert image.get_clim() == (-3, 3)
    white, low, high = (image.to_rgba(number)[:3] for number in (0.0, -3.0, 3.0))
    assert min(white) > 0.95
    assert low[2] > low[0] + 0.2  # blue
    assert high[0] > high[2] + 0.2  # red


def test_means_on_a_logarithmic_axis_are_geometric():
    _, (axes,) = plotting.new_figure(2, 1)
    seeds = [[1.0, 4.0, 0.0], [9.0, 9.0, 9.0], [np.nan, 16.0, 4.0], [0.0, 0.0, np.inf]]
    plotting.draw_band(axes, [1, 2, 3, 4], np.array(seeds), index=0, label="dot", log=True)
    # A seed without a logarithm does not count; a point without any seed is not drawn.
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [2.0, 9.0, 8.0, np.nan])
    edges = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert edges.max() == pytest.approx(8 * 2 ** (2**0.5))  # log 4 and log 16: sd log(4) / sqrt(2)
    plotting.draw_band(axes, [1, 2, 3, 4], np.array(seeds), index=0, label="dot")
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [5 / 3, 9.0, 10.0, 0.0])


def test_a_saved_figure_has_the_colors_that_were_drawn(tmp_path):
    weights = np.linspace(0, 1, 15 * 20).reshape(15, 20)
    figure = plotting.weight_heatmaps({"dot": (weights, [""] * 15, [""] * 20)})
    figure.axes[0].plot([0, 19], [0, 14], color=plotting.COLORS[1], linewidth=0.5)  # a rare color
    figure.set_layout_engine("none")  # which moves axes from one drawing to the next
    everything = tmp_path / "everything.png"
    figure.savefig(everything, dpi=120)
    saved = plotting.save(figure, tmp_path / "saved.png")
    colors, expected = (matplotlib.image.imread(path)[..., :3] for path in (saved, everything))
    np.testing.assert_allclose(colors, expected, atol=12 / 255)
    assert saved.stat().st_size < everything.stat().st_size / 1.5


def drawn_figures():
    """Bytes of figures with heat maps, bands, legends, bars of colours and points."""
    weights = np.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    yield plotting.png(plotting.weight_heatmaps({"dot": (weights, "ab", "abc")}))
    figure, (left, right) = plotting.new_figure(4, 2, columns=2)
    plotting.draw_gradients(left, weights, "ab", "abc")
    plotting.draw_band(right, [1, 2], weights[:, :2], index=0, label="dot")
    yield plotting.png(figure)
    yield plotting.png(results_by_setting({"loss": {("dot", "b"): Result([2.0, 3.0], False)}}))


def test_figures_do_not_depend_on_the_users_settings():
    users = {"text.usetex": True, "image.origin": "lower", "image.interpolation": "bilinear"}
    users |= {"axes.grid": True, "axes.facecolor": "black", "lines.linewidth": 9}
    users |= {"figure.titlesize": 30, "axes.titlesize": 30, "savefig.transparent": True}
    plain = [*drawn_figures()]
    with matplotlib.rc_context(users):
        assert [*drawn_figures()] == plain
        assert matplotlib.rcParams["image.origin"] == "lower"
        figure, (axes,) = plotting.new_figure(2, 2)
        axes.text(0, 0, "a", usetex=None)  # what a caller adds needs no TeX
        plotting.png(figure)


@pytest.mark.parametrize(
    ("suffix", "head"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
@pytest.mark.parametrize("text", ["a $\\foo$ b", "a $x_$ b", "$a_$", "5 $", "_a^b", "😀 שלום"])
def test_what_users_wrote_can_be_drawn(text, suffix, head, tmp_path):
    pairs = np.array([[0.25, 0.75]])
    values = {(text, text): Result([1.0, 3.0], False), ("dot", "b"): Result([2.0], False)}
    for draw in (
        lambda: plotting.weight_heatmaps({text: (pairs, [text], [text, "\x1b[2J"])}),
        lambda: results_by_setting({text: values}),
    ):
        saved, again = (plotting.save(draw(), tmp_path / f"{n}{suffix}").read_bytes() for n in "ab")
        assert saved.startswith(head)
        assert saved == again
        assert not re.search(rb"(?i)date\b", saved)


def test_dollars_are_letters():
    def drawn(figure, text):
        axes, bars = figure.axes
        axes.plot([1, 1000], label=text)
        axes.set(title=text, xlabel=text)
        bars.set_xticks([0, 1], [text, "b"])
        figure.legend()
        return plotting.png(figure)

    plain = Figure(figsize=(4, 3), layout="constrained")
    plain.subplots(1, 2)
    literal, _ = plotting.new_figure(4, 3, columns=2)
    assert drawn(literal, "$a_1$ b") == drawn(plain, r"\$a_1\$ b")


@pytest.mark.parametrize(
    ("base", "values", "expected"),
    [(10, (1e-5, 100), ["1e-05", "0.001", "0.1", "10"]), (2, (1 / 4, 4), ["0.25", "0.5", "1"])],
)
def test_labels_of_logarithmic_axes_are_numbers(base, values, expected):
    figure, (axes,) = plotting.new_figure(3, 3)
    axes.plot([1, 2], values)
    axes.set_yscale("log", base=base)
    plotting.png(figure)
    assert {*expected} <= {label.get_text() for label in axes.get_yticklabels()}
