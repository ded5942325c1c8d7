"""Figures of accuracy against length, for the experiments beyond the lengths of training."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.reversal.curves import BARS, draw_band, draw_shares
from experiments.score_colors import score_indices


def accuracy_figure(arms: JSON, *, trained: int) -> Figure:
    """One row per alphabet: letters right up to length 500, and whole strings right far beyond."""
    figure, axes = plotting.new_figure(10, 3.4 * len(arms) + 0.4, rows=len(arms), columns=2)
    for row, (letters, scores) in enumerate(arms.items()):
        near, far = axes[2 * row : 2 * row + 2]
        indices = score_indices(scores)
        _prepare(far, list(next(iter(scores.values()))["exact"]), trained)
        for place, (score, arm) in enumerate(scores.items()):
            lengths, shares = _percent(arm["tokens"])
            draw_band(near, lengths, shares, index=indices[score], label=score, most=100)
            lengths, shares = _percent(arm["exact"])
            draw_shares(
                far, lengths, shares, index=indices[score], place=place, count=len(scores),
                label=score, most=100,
            )  # fmt: skip
        near.set_title(f"{letters} letters: letters right, earlier ones given")
        bottom, _ = near.get_ylim()
        near.set_ylim(bottom, 100 + (100 - bottom) / 50)
        near.set_xlabel("length of the string (means of neighbouring lengths)")
        near.set_ylabel("letters right (%)")
        far.set_title(f"{letters} letters: whole strings right, free running")
        far.set_ylabel("strings right (%)")
        far.legend(loc="center left")
    figure.suptitle(f"Bands and {BARS}", fontsize=10)
    return figure


def strings_right_figure(exact: dict[str, JSON], *, trained: int) -> Figure:
    """Whole strings right against length, {score: {length: shares by seed}}."""
    figure, (axes,) = plotting.new_figure(7, 3.6)
    indices = score_indices(exact)
    _prepare(axes, list(next(iter(exact.values()))), trained)
    for place, (score, by_length) in enumerate(exact.items()):
        lengths, shares = _percent(by_length)
        draw_shares(
            axes, lengths, shares, index=indices[score], place=place, count=len(exact), label=score,
            most=100,
        )  # fmt: skip
    axes.set_ylabel("strings right (%), free running")
    axes.legend(loc="lower left")
    axes.set_title(BARS.capitalize(), fontsize=10)
    return figure


def panels_figure(
    panels: dict[str, dict[str, JSON]],
    *,
    trained: list[int],
    ylabel: str,
    title: str = "",
    many_curves: bool = False,
) -> Figure:
    """Shares against length: {panel: {curve: {length: shares by seed}}}, two panels a row.

    A curve has the same colour in every panel that has it.

    Args:
        panels: the first one has all curves, if there are `many_curves`.
        trained: the longest length of training in each panel, one of its lengths.
        ylabel: what the shares are.
        title: put before the words about the bars.
        many_curves: whether lengths are evenly spaced, with room for many points side by side, and
            one legend below the panels names the curves.
    """
    rows = -(-len(panels) // 2)
    figure, axes = plotting.new_figure(10, 3.2 * rows + 0.4, rows=rows, columns=2, sharey=True)
    for panel, (name, curves), longest in zip(axes, panels.items(), trained, strict=False):
        tested = list(next(iter(curves.values())))
        indices = list(next(iter(panels.values())) if many_curves else curves)
        if many_curves:
            panel.set_xticks(range(len(tested)), [f"{int(length):,}" for length in tested])
            _prepare_shares(panel, tested.index(str(longest)))
        else:
            _prepare(panel, tested, longest)
        for label, by_length in curves.items():
            lengths, shares = _percent(by_length)
            draw_shares(
                panel, range(len(tested)) if many_curves else lengths, shares,
                index=indices.index(label), count=len(indices), label=label, most=100,
            )  # fmt: skip
        panel.set_title(name)
        panel.set_ylabel(ylabel)
        if not many_curves:
            panel.legend(loc="center left", fontsize=8)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    if many_curves:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(f"{title}{BARS.capitalize()}", fontsize=10)
    return figure


def heat_map_figure(weights: dict[str, JSON]) -> Figure:
    """Weights by score; there are too many positions to label each."""
    figure, axes = plotting.new_figure(2.7 * len(weights) + 0.8, 3.2, columns=len(weights))
    for panel, (score, of_score) in zip(axes, weights.items(), strict=True):
        dense = np.zeros(of_score["shape"])
        dense[of_score["rows"], of_score["columns"]] = of_score["weights"]
        image = panel.imshow(dense, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        panel.set_title(score)
        panel.set_xlabel("source (key); the first is SOS")
    axes[0].set_ylabel("letter written (query); the last is EOS")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    return figure


def _prepare(axes: Axes, lengths: list[str], trained: int) -> None:
    """A logarithmic axis with the tested lengths, and a line at the longest of training."""
    axes.set_xscale("log")
    axes.set_xticks([int(length) for length in lengths], [f"{int(n):,}" for n in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)
    _prepare_shares(axes, trained)


def _prepare_shares(axes: Axes, trained: float) -> None:
    axes.axvline(trained, color="gray", linestyle=":", linewidth=1)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("length of the string (dotted: longest in training)")


def _percent(by_length: JSON) -> tuple[list[int], np.ndarray]:
    """The lengths, and the percentages [lengths, seeds]."""
    return [int(length) for length in by_length], 100 * np.array(list(by_length.values()))
