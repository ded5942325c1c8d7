"""Figures of entropy_vs_dimension.py, drawn from its numbers alone."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.entropy_limits import raw_entropy_limit, scaled_entropy_limit
from experiments.experiment import JSON

ARMS = ("raw", "scaled")
DRAWN = (1, 16, 64, 256, 512)  # dimensions of the notebook's heat maps
DRAWN_KEYS = 4  # queries and keys in each

CAPTIONS = {
    "entropy_vs_dimension": (
        "Entropy of attention over 16 and over 64 random keys against their dimension, from 1 to "
        "4096. Scaled, it stays at one level, 0.4 to 0.5 nats below the logarithm of the number of "
        "keys. Raw, it falls as one over the square root of the dimension. In a third panel the "
        "distance of scaled entropy from uniform rises to half a nat as the number of keys grows."
    ),
    "entropy_vs_dimension_weights": (
        "Mean largest weight against dimension. Raw attention goes from 0.2 (16 keys) and 0.1 (64 "
        "keys) at dimension 1 to 0.98 at 4096; scaled attention stays near one quarter and one "
        "tenth."
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
    config = numbers["config"]
    dims, sweeps = config["dims"], numbers["sweeps"]
    panels = len(sweeps) + 1
    figure, axes = plotting.new_figure(4.0 * panels - 0.3, 4.4, columns=panels)
    for ax, (keys, arms) in zip(axes, sweeps.items(), strict=False):
        count = int(keys)
        for index, arm in enumerate(ARMS):
            _band(ax, dims, arms[arm]["entropy"], index, f"{arm}, mean (band: 10 to 90 %)")
        uniform = math.log(count)
        ax.axhline(uniform, color="gray", ls="--", label=f"uniform: log T = {uniform:.2f}")
        beyond = [dim for dim in dims if dim >= 8]
        ax.plot(
            beyond, [raw_entropy_limit(dim, count) for dim in beyond], color="black", ls=":",
            label=r"$(\pi^2/6)\,m_T/\sqrt{d_k}$",
        )  # fmt: skip
        _log_axis(ax, dims)
        ax.set_ylim(-0.05, uniform * 1.55)
        ax.set(xlabel="$d_k$", ylabel="entropy (nats)", title=f"{count} keys")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9, loc="upper right")
    ax, distances = axes[-1], numbers["more_keys"]
    counts = config["more_keys"]
    log_keys = np.log(counts)
    color, errors = plotting.COLORS[1], 1.96 * np.array(distances["sd"]) / config["samples"] ** 0.5
    ax.errorbar(
        counts, log_keys - distances["mean"], errors, color=color, marker=plotting.MARKERS[1],
        markersize=5, label="scaled, mean ± 1.96 standard errors",
    )  # fmt: skip
    ax.plot(
        counts, log_keys - [scaled_entropy_limit(count) for count in counts], "k:",
        label=r"$\frac{1}{2}-(1+e)/(2T)$",
    )  # fmt: skip
    ax.axhline(0.5, color="gray", ls="--", label="1/2")
    _log_axis(ax, counts)
    ax.set_ylim(0, 0.75)
    ax.set(
        xlabel="number of keys T", ylabel="log T - entropy (nats)",
        title="scaled: distance from uniform",
    )  # fmt: skip
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9, loc="lower right")
    figure.suptitle("Entropy of attention over random keys, against their dimension")
    return figure


def _weights_figure(numbers: JSON) -> Figure:
    dims, sweeps = numbers["config"]["dims"], numbers["sweeps"]
    figure, axes = plotting.new_figure(4.2 * len(sweeps), 3.9, columns=len(sweeps), sharey=True)
    for ax, (keys, arms) in zip(axes, sweeps.items(), strict=True):
        for index, arm in enumerate(ARMS):
            _band(ax, dims, arms[arm]["max_weight"], index, f"{arm}, mean (band: 10 to 90 %)")
        ax.axhline(1 / int(keys), color="gray", ls="--", label=f"uniform: 1/{keys}")
        _log_axis(ax, dims)
        ax.set_ylim(0, 1.5)
        ax.set_yticks(np.linspace(0, 1, 6))
        ax.set(xlabel="$d_k$", ylabel="largest attention weight", title=f"{keys} keys")
        ax.label_outer()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9, loc="upper left")
    return figure


def _heatmap_figure(numbers: JSON) -> Figure:
    figure, axes = plotting.new_figure(
        2.1 * len(DRAWN) + 0.8, 4.7, rows=2, columns=len(DRAWN), sharex=True, sharey=True
    )
    ticks = [str(n + 1) for n in range(DRAWN_KEYS)]
    panels = [(arm, n) for arm in ARMS for n in range(len(DRAWN))]
    for ax, (arm, n) in zip(axes, panels, strict=True):
        image = plotting.draw_weights(ax, np.array(numbers["heatmaps"][arm][n]), ticks, ticks)
        ax.set(title=f"{arm}, $d_k$ = {DRAWN[n]}", xlabel="key", ylabel="query")
        ax.label_outer()
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    return figure


def _log_axis(ax: Axes, sizes: list[int]) -> None:
    """A logarithmic axis with a tick at every power of 4."""
    ticks = [4**n for n in range(12) if sizes[0] <= 4**n <= sizes[-1]]
    ax.set_xscale("log")
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()


def _band(ax: Axes, x: list[int], curves: dict[str, list[float]], index: int, label: str) -> None:
    color = plotting.COLORS[index]
    marker = plotting.MARKERS[index]
    ax.plot(x, curves["mean"], color=color, marker=marker, markersize=5, label=label)
    ax.fill_between(x, curves["low"], curves["high"], color=color, alpha=0.2, linewidth=0)
