"""Figures of scale_and_dimension.py, drawn from its numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.reversal.arms import loss_of_guessing
from experiments.reversal.scale_and_dimension_answers import at_best_rate, best_rate
from experiments.score_colors import score_indices

CAPTIONS = {
    "scale_and_dimension_training": (
        "Dot and scaled dot while they learn to reverse strings, one column per size d of the"
        " model: loss, entropy of the cross attention and deviation of its logits within a row,"
        " over steps; each at its best learning rate. Lines are means over seeds, bands one"
        " standard deviation on either side, both of logarithms where the axis is logarithmic."
    ),
    "scale_and_dimension_rates": (
        "Final loss of dot and scaled dot over the learning rate, one panel per size d of the"
        " model. Points are geometric means over seeds, bands one standard deviation of the"
        " logarithms on either side."
    ),
    "scale_and_dimension_sizes": (
        "Final loss, and share of strings reversed, of dot times a constant, over the initial"
        " deviation of its logits within a row; each at its best rate. Open symbols: dot and scaled"
        " dot as they are, at every d. Points are means over seeds, bands one standard deviation on"
        " either side, both of logarithms for the loss, and cut off at 0 and 1 for the share."
    ),
    "scale_and_dimension_scores": (
        "Final loss, and share of strings reversed, of the four scores at one d, each at its best"
        " rate: as they are, with logits that begin with equal deviations, with equally many"
        " parameters, and with both equal. Points are seeds, lines their means."
    ),
}

_LIMITS = {"loss": (0.0, np.inf), "exact_match": (0.0, 1.0)}
_NAMES = {"dot": "dot", "scaled": "scaled dot"}
_AS_IT_IS = {"dot": "s", "scaled": "^"}
_INDICES = score_indices(("additive", "dot", "general", "scaled", "dot = scaled"))
# Colours of dimensions, none of which is a score's in the same figure.
_DIM_INDICES = (4, 5, 6)


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    figures = (_training(numbers), _rates(numbers), _sizes(numbers), _scores(numbers))
    return dict(zip(CAPTIONS, figures, strict=True))


def _training(numbers: JSON) -> Figure:
    dims = numbers["dimension"]
    figure, axes = plotting.new_figure(
        0.6 + 2.8 * len(dims), 6.4, rows=3, columns=len(dims), sharex="col", sharey="row"
    )
    rows = {
        "loss": "loss (nats per token)",
        "entropy": "entropy (nats)",
        "logit_sd": "logits' sd within a row",
    }
    for row, (name, label) in enumerate(rows.items()):
        for column, (dim, of_dim) in enumerate(dims.items()):
            ax = axes[row * len(dims) + column]
            for score in _NAMES:
                plotting.draw_band(
                    ax, of_dim["steps"], np.array(of_dim[score]["curves"][name]),
                    index=_INDICES[score], log=name != "entropy", limits=(0, np.inf),
                    label=f"{_NAMES[score]}, rate {best_rate(of_dim[score])}",
                )  # fmt: skip
            ax.grid(alpha=0.3)
            if name != "entropy":
                ax.set_yscale("log")
            if column == 0:
                ax.set_ylabel(label)
            if row == 0:
                _guessing(ax)
                ax.set_title(f"reversal model, d = {dim}")
                ax.legend(fontsize=9)
            if row == len(rows) - 1:
                ax.set_xlabel("step")
    return figure


def _rates(numbers: JSON) -> Figure:
    dims = numbers["dimension"]
    figure, axes = plotting.new_figure(0.6 + 3 * len(dims), 3.4, columns=len(dims), sharey=True)
    for ax, (dim, of_dim) in zip(axes, dims.items(), strict=True):
        for score in _NAMES:
            rates = of_dim[score]["rates"]
            losses = np.array([of_rate["loss"] for of_rate in rates.values()])
            x = [float(rate) for rate in rates]
            plotting.draw_band(ax, x, losses, index=_INDICES[score], label=_NAMES[score], log=True)
        _guessing(ax)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(x, list(rates))
        ax.minorticks_off()
        ax.set(title=f"d = {dim}, {of_dim['steps'][-1]} steps", xlabel="learning rate")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("final loss (nats per token)")
    axes[0].legend(fontsize=9)
    return figure


def _sizes(numbers: JSON) -> Figure:
    figure, axes = plotting.new_figure(9, 4.2, columns=2)
    labels = {"loss": "final loss (nats per token)", "exact_match": "share of strings reversed"}
    colors = {
        dim: _DIM_INDICES[place % len(_DIM_INDICES)]
        for place, dim in enumerate(numbers["dimension"])
    }
    for ax, (name, label) in zip(axes, labels.items(), strict=True):
        log = name == "loss"
        for dim, arms in numbers["size"].items():
            values = np.array([at_best_rate(arm, name) for arm in arms.values()])
            x = [float(size) for size in arms]
            plotting.draw_band(
                ax, x, values, index=colors[dim], label="", log=log, limits=_LIMITS[name]
            )
        for dim, of_dim in numbers["dimension"].items():
            for score, marker in _AS_IT_IS.items():
                values = at_best_rate(of_dim[score], name)
                middle = np.exp(np.log(values).mean()) if log else values.mean()
                ax.plot(
                    np.mean(of_dim[score]["initial_logit_sd"]), middle, marker, markersize=9,
                    markerfacecolor="white", markeredgewidth=1.6, zorder=3,
                    color=plotting.COLORS[colors[dim]],
                )  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_xticks(x, [f"{size:g}" for size in x])
        ax.set(xlabel="sd of logits within a row, before training", ylabel=label)
        ax.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].set_title("Dot times a constant: how large may logits be?")
    _guessing(axes[0])
    axes[1].set_title("Strings of lengths 3-8, decoded freely")
    axes[1].set_ylim(-0.03, 1.03)
    axes[0].legend(handles=_handles(colors), fontsize=9, loc="lower right")
    return figure


def _handles(colors: dict[str, int]) -> list[Line2D]:
    """Legend entries: colours for dimensions, open symbols for scores as they are."""
    black: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "linestyle": "none"}
    return [
        *(
            Line2D([], [], color=plotting.COLORS[index], label=f"d = {dim}")
            for dim, index in colors.items()
        ),
        *(
            Line2D([], [], marker=marker, label=f"{_NAMES[score]} as it is", **black)
            for score, marker in _AS_IT_IS.items()
        ),
        Line2D([], [], color="black", linestyle="--", linewidth=1, label="guessing letters"),
    ]


def _scores(numbers: JSON) -> Figure:
    config, comparisons = numbers["config"], numbers["scores"]
    figure, axes = plotting.new_figure(10.6, 5.8, rows=2, columns=len(comparisons), sharey="row")
    labels = {"loss": "final loss (nats per token)", "exact_match": "share of strings reversed"}
    for row, (name, label) in enumerate(labels.items()):
        for column, (what, arms) in enumerate(comparisons.items()):
            ax = axes[row * len(comparisons) + column]
            for position, (score, arm) in enumerate(arms.items()):
                values = at_best_rate(arm, name)
                index = _INDICES[score]
                color, marker = plotting.COLORS[index], plotting.MARKERS[index]
                across = position + np.linspace(-0.15, 0.15, len(values))
                ax.plot(across, values, marker, color=color, markersize=6)
                ax.hlines(values.mean(), position - 0.3, position + 0.3, color=color, linewidth=2)
            ax.set_xticks(range(len(arms)), [score.replace(" = ", " =\n") for score in arms])
            ax.set_xlim(-0.6, len(arms) - 0.4)
            ax.grid(axis="y", alpha=0.3)
            if row == 0:
                ax.set_yscale("log")
                ax.set_title(what)
            else:
                ax.set_ylim(-0.03, 1.03)
            if column == 0:
                ax.set_ylabel(label)
    figure.suptitle(
        f"Learning to reverse strings, d = {config['score_dim']}, each at its best learning rate:"
        f" {config['seeds']} seeds and their mean"
    )
    return figure


def _guessing(ax: Axes) -> None:
    ax.axhline(loss_of_guessing(), color="black", linestyle="--", linewidth=1, label="guessing")
