"""Figures of worked_example.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.score_colors import FIRST_FREE, score_indices

CAPTIONS = {
    "worked_example": (
        "One bar chart per score: the four summands of its logit for the same query and key. The"
        " sum stands above each chart."
    ),
    "worked_example_three_tokens": (
        "Attention of three tokens by hand in four tables: dot products, scaled by 1/sqrt(2),"
        " weights, output. The third query weighs all keys alike; each of the other two prefers its"
        " own key."
    ),
    "worked_example_cost": (
        "Multiplications of the general score against the number of keys, on logarithmic axes: each"
        " pair alone, keys projected once, and queries projected once. Counts lie on the formulas."
    ),
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    return {
        "worked_example": _plot_summands(numbers["scores"]),
        "worked_example_three_tokens": _plot_three_tokens(numbers["three_tokens"]),
        "worked_example_cost": _plot_cost(numbers["multiplications"], numbers["config"]),
    }


_FORMULAS = {
    "dot": "$s_i\\,h_i$",
    "scaled": "$s_i\\,h_i\\,/\\,\\sqrt{4}$",
    "general": "$(s^T W)_i\\,h_i$",
    "additive": "$v_i\\,\\tanh(W_q s + W_k h)_i$",
}


def _plot_summands(scores: JSON) -> Figure:
    figure, axes = plotting.new_figure(
        max(2.6 * len(scores), 5.2), 3.4, columns=len(scores), sharey=True
    )
    indices = score_indices(scores)
    for ax, (name, traced) in zip(axes, scores.items(), strict=True):
        # Only the scores of the source have summands by feature.
        heights = traced["summands"] or [traced["logit"]]
        bars = ax.bar(range(1, len(heights) + 1), heights, color=_color(indices[name]))
        ax.bar_label(bars, fmt="%.3f", padding=2)
        ax.axhline(0, color="black", linewidth=0.8)
        formula = f": {_FORMULAS[name]}" if traced["summands"] else ""
        ax.set_title(f"{name}{formula}\nlogit {traced['logit']:+.4f}", fontsize=11)
        if traced["summands"]:
            ax.set(xlabel="feature i", xticks=range(1, len(heights) + 1))
        else:
            ax.set(xlabel="logit", xticks=[], xlim=(-0.5, 2.5))
    axes[0].set_ylabel("summand of the logit")
    axes[0].margins(y=0.15)
    figure.suptitle("The logit of one query s and one key h, and its summands, for each score")
    return figure


def _color(index: int) -> str:
    return plotting.COLORS[index % len(plotting.COLORS)]


def _plot_three_tokens(tables: JSON) -> Figure:
    figure, axes = plotting.new_figure(
        10.5, 3.6, columns=4, gridspec_kw={"width_ratios": [3, 3, 3, 2]}
    )
    titles = {
        "QK^T": "dot products $QK^T$",
        "QK^T / sqrt(2)": "scaled $QK^T/\\sqrt{2}$",
        "A": "weights A, rows sum to 1",
        "AV": "output AV",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        _draw_table(ax, np.array(tables[name]))
        ax.set_title(title, fontsize=11)
        ax.set_xlabel("feature" if name == "AV" else "key")
    axes[0].set_ylabel("query")
    figure.suptitle(
        "Three tokens by hand: the third query lies between the keys and weighs all alike"
    )
    return figure


def _draw_table(ax: Axes, table: np.ndarray) -> None:
    ax.imshow(table, cmap="viridis", vmin=0, vmax=1)
    for (row, column), number in np.ndenumerate(table):
        color = "white" if number < 0.6 else "black"
        ax.text(column, row, f"{number:.4f}", ha="center", va="center", color=color)
    ax.set_xticks(range(table.shape[1]), [str(i + 1) for i in range(table.shape[1])])
    ax.set_yticks(range(table.shape[0]), [str(i + 1) for i in range(table.shape[0])])
    ax.tick_params(length=0)


def _plot_cost(counts: list[JSON], config: JSON) -> Figure:
    figure, (ax,) = plotting.new_figure(7, 4.4)
    lengths = [count["source_length"] for count in counts]
    target_length, dim = config["target_length"], config["dim"]
    x = np.geomspace(min(lengths), max(lengths), 100)
    pairs = target_length * x
    formulas = {
        "pairs": ("each pair alone: $TS(D^2 + D)$", pairs * (dim**2 + dim)),
        "keys": ("keys projected once: $SD^2 + TSD$", x * dim**2 + pairs * dim),
        "queries": ("queries projected once: $TD^2 + TSD$", target_length * dim**2 + pairs * dim),
    }
    for index, (way, (label, formula)) in enumerate(formulas.items(), start=FIRST_FREE):
        color = plotting.COLORS[index]
        ax.plot(x, formula, color=color, label=label)
        counted = [count[way]["counted"] for count in counts]
        ax.plot(lengths, counted, plotting.MARKERS[index], color=color)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="keys S",
        ylabel="multiplications",
        title=f"The general score of T = {config['target_length']} queries, D = {config['dim']}:\n"
        "lines are formulas, markers counts in the traced programs",
    )
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.legend()
    return figure
