"""Figures of entropy_vs_dimension.py, drawn from its numbers alone."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.entropy_limits import raw_entropy_limit, scaled_entropy_limit
from experiments.experiment import JSON
from experiments.score_colors import score_indices

DRAWN = (1, 16, 64, 256, 512)  # dimensions of the notebook's heat maps
DRAWN_KEYS = 4  # queries and keys in each
_ADJECTIVES = {"dot": "dot (raw)"}

CAPTIONS = {
    "entropy_vs_dimension": (
        "Entropy of attention over random keys against their dimension, a panel per number of keys."
        " Scaled, it stays at one level below the logarithm of the number of keys. Raw, it falls as"
        " one over the square root of the dimension. In the last panel the distance of scaled"
        " entropy from uniform rises to half a nat as the number of keys grows."
    ),
    "entropy_vs_dimension_weights": (
        "Mean largest weight against dimension, a panel per number of keys. Raw attention becomes"
        " nearly one-hot as the dimension grows; scaled attention stays spread."
    ),
    "entropy_vs_dimension_heatmaps": (
        "Attention weights of four queries over four keys, of dimension 1 to 512. Upper row, raw: "
        "rows become one-hot. Lower row, scaled: they stay spread at every dimension."
    ),
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws entropies, largest weights and heat maps."""
    return {
        "entropy_vs_dimension": _entropy_figure(numbers),
        "entropy_vs_dimension_weights": _weights_figure(numbers),
        "entropy_vs_dimension_heatmaps": _heatmap_figure(numbers),
    }


def _entropy_figure(numbers: JSON) -> Figure:
    dims, sweeps = numbers["config"]["dims"], numbers["sweeps"]
    panels = len(sweeps) + 1
    figure, axes = plotting.new_figure(4.0 * panels - 0.3, 4.6, columns=panels)
    for ax, (keys, by_score) in zip(axes, sweeps.items(), strict=False):
        count = int(keys)
        for score, index in score_indices(by_score).items():
            _band(ax, dims, by_score[score]["entropy"], index, _name(score))
        uniform = math.log(count)
        ax.axhline(uniform, color="gray", ls="--", label="uniform: log T")
        beyond = [dim for dim in dims if dim >= 8]
        if "dot" in by_score:
            ax.plot(
                beyond, [raw_entropy_limit(dim, count) for dim in beyond], color="black", ls=":",
                label=r"$(\pi^2/6)\,m_T\,E[1/|q|]$",
            )  # fmt: skip
        _log_axis(ax, dims)
        ax.set_ylim(0, uniform * 1.05)
        ax.set(
            xlabel="$d_k$", ylabel="entropy (nats)", title=f"{count} keys, log T = {uniform:.2f}"
        )
        ax.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    _distances(axes[-1], numbers)
    handles += axes[-1].get_legend_handles_labels()[0]
    labels += axes[-1].get_legend_handles_labels()[1]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(
        "Entropy of attention over random keys (mean; bands: 10 to 90 % of the queries)"
    )
    return figure


def _distances(ax: Axes, numbers: JSON) -> None:
    """The distance of each score's entropy from uniform, against the number of keys."""
    config = numbers["config"]
    counts = config["more_keys"]
    log_keys = np.log(counts)
    for score, index in score_indices(numbers["more_keys"]).items():
        distances = numbers["more_keys"][score]
        ax.errorbar(
            counts, log_keys - distances["mean"],
            1.96 * np.array(distances["sd"]) / config["samples"] ** 0.5,
            color=plotting.COLORS[index % len(plotting.COLORS)],
            marker=plotting.MARKERS[index % len(plotting.MARKERS)], markersize=5,
        )  # fmt: skip
    if "scaled" in numbers["more_keys"]:
        many = [count for count in counts if count >= 16]  # the limit is for many keys
        ax.plot(
            many, [math.log(count) - scaled_entropy_limit(count) for count in many], "k-.",
            label=r"scaled: $\frac{1}{2}-(1+e)/(2T)$",
        )  # fmt: skip
    ax.axhline(0.5, color="gray", ls=":", label="1/2")
    _log_axis(ax, counts)
    ax.set(
        yscale="log", xlabel="number of keys T", ylabel="log T - entropy (nats)",
        title=f"distance from uniform, $d_k$ = {config['more_keys_dim']}\n(± 1.96 standard errors)",
    )  # fmt: skip
    ax.grid(alpha=0.3)


def _weights_figure(numbers: JSON) -> Figure:
    dims, sweeps = numbers["config"]["dims"], numbers["sweeps"]
    figure, axes = plotting.new_figure(4.2 * len(sweeps), 4.1, columns=len(sweeps), sharey=True)
    for ax, (keys, by_score) in zip(axes, sweeps.items(), strict=True):
        for score, index in score_indices(by_score).items():
            _band(ax, dims, by_score[score]["max_weight"], index, _name(score))
        ax.axhline(1 / int(keys), color="gray", ls="--", label="uniform: 1 / T")
        _log_axis(ax, dims)
        ax.set_ylim(0, 1.02)
        ax.set(xlabel="$d_k$", ylabel="largest attention weight", title=f"{keys} keys")
        ax.label_outer()
        ax.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle("Mean (bands: 10 to 90 % of the queries)", fontsize=11)
    return figure


def _heatmap_figure(numbers: JSON) -> Figure:
    heatmaps = numbers["heatmaps"]
    figure, axes = plotting.new_figure(
        2.1 * len(DRAWN) + 0.8, 2.2 * len(heatmaps) + 0.3, rows=len(heatmaps), columns=len(DRAWN),
        sharex=True, sharey=True,
    )  # fmt: skip
    ticks = [str(n + 1) for n in range(DRAWN_KEYS)]
    panels = [(score, n) for score in heatmaps for n in range(len(DRAWN))]
    for ax, (score, n) in zip(axes, panels, strict=True):
        image = plotting.draw_weights(ax, np.array(heatmaps[score][n]), ticks, ticks)
        ax.set(title=f"{_name(score)}, $d_k$ = {DRAWN[n]}", xlabel="key", ylabel="query")
        ax.label_outer()
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    return figure


def _name(score: str) -> str:
    return _ADJECTIVES.get(score, score)


def _log_axis(ax: Axes, sizes: list[int]) -> None:
    """A logarithmic axis with a tick at every power of 4."""
    ticks = [4**n for n in range(12) if sizes[0] <= 4**n <= sizes[-1]]
    ax.set_xscale("log")
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()


def _band(ax: Axes, x: list[int], curves: dict[str, list[float]], index: int, label: str) -> None:
    color = plotting.COLORS[index % len(plotting.COLORS)]
    marker = plotting.MARKERS[index % len(plotting.MARKERS)]
    ax.plot(x, curves["mean"], color=color, marker=marker, markersize=5, label=label)
    ax.fill_between(x, curves["low"], curves["high"], color=color, alpha=0.2, linewidth=0)
