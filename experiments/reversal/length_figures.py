"""Figures of length_generalization.py and length_ablations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from attention_jax.reports import plotting
from experiments.experiment import JSON

BIN = 23  # neighbouring lengths per point


def accuracy_figure(arms: JSON, *, trained: int) -> Figure:
    """One row per alphabet: letters right at every length, and whole strings right far beyond."""
    figure, axes = plotting.new_figure(11, 3.6 * len(arms), rows=len(arms), columns=2)
    for row, (letters, scores) in enumerate(arms.items()):
        near, far = axes[2 * row : 2 * row + 2]
        for index, (score, arm) in enumerate(scores.items()):
            _band(near, _binned(arm["teacher_forced"]["tokens"]), index, score)
            _band(far, arm["free_running"]["exact"], index, score)
        near.set_title(
            f"{letters} letters: letters right, those before given, means of {BIN} lengths"
        )
        bottom, _ = near.get_ylim()
        near.set_ylim(bottom, 100 + (100 - bottom) / 50)
        near.set_xlabel("length of the string")
        near.set_ylabel("letters right (%)")
        far.set_title(f"{letters} letters: whole strings right, free running")
        far.set_xscale("log")
        lengths = [int(length) for length in next(iter(scores.values()))["free_running"]["exact"]]
        far.set_xticks(lengths, [f"{length:,}" for length in lengths])
        far.xaxis.set_minor_formatter(NullFormatter())
        far.set_ylim(-3, 103)
        far.axvline(trained, color="gray", linestyle=":", linewidth=1)
        far.annotate(
            "longest in training", (trained, 52), rotation=90, color="gray", fontsize=8, ha="right"
        )
        far.set_xlabel("length of the string")
        far.set_ylabel("strings right (%)")
        far.legend(loc="lower left")
    return figure


def ablation_figure(panels: dict[str, dict[str, JSON]], *, trained: int) -> Figure:
    """Letters right against length: one panel per part of the recipe, one curve per arm."""
    rows = -(-len(panels) // 2)
    figure, axes = plotting.new_figure(11, 3.4 * rows, rows=rows, columns=2, sharey=True)
    for panel, (title, arms) in zip(axes, panels.items(), strict=False):
        for index, (name, arm) in enumerate(arms.items()):
            _band(panel, arm["tokens"], index, name)
        panel.set_title(title)
        panel.set_xscale("log")
        lengths = [int(length) for length in next(iter(arms.values()))["tokens"]]
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.axvline(trained, color="gray", linestyle=":", linewidth=1)
        panel.set_ylim(-3, 103)
        panel.set_xlabel("length of the string (dotted: longest in training)")
        panel.set_ylabel("letters right (%)")
        panel.legend(loc="center left", fontsize=8)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    return figure


def heat_map_figure(weights: dict[str, np.ndarray]) -> Figure:
    """Weights [T, S] by score; there are too many positions to label each."""
    figure, axes = plotting.new_figure(3.1 * len(weights) + 0.8, 3.6, columns=len(weights))
    for panel, (score, of_score) in zip(axes, weights.items(), strict=True):
        image = panel.imshow(of_score, cmap="viridis", vmin=0, vmax=1, aspect="equal")
        panel.set_title(score)
        panel.set_xlabel("letter of the source (key)")
    axes[0].set_ylabel("letter written (query); the last is EOS")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    return figure


def _binned(by_length: JSON) -> JSON:
    """Means over bins of neighbouring lengths, by the mean length of each bin."""
    lengths = list(by_length)
    bins = [lengths[first : first + BIN] for first in range(0, len(lengths), BIN)]
    return {
        str(round(np.mean([int(n) for n in bin_]))): np.mean([by_length[n] for n in bin_], axis=0)
        for bin_ in bins
    }


def _band(axes: Any, by_length: JSON, index: int, label: str) -> None:
    """Draws shares as percentages."""
    lengths = [int(length) for length in by_length]
    values = 100 * np.array(list(by_length.values()))
    plotting.draw_band(axes, lengths, values, index=index, label=label)
