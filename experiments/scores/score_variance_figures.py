"""Figures of score_variance.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.score_colors import FIRST_FREE, score_indices

CAPTIONS = {
    "score_variance": (
        "Standard deviation of dot products against the number of features D: raw ones lie on the"
        " square root of D, as do the source's five draws; scaled ones stay at 1. A second panel"
        " shows the raw ones divided by the root."
    ),
    "score_variance_heatmaps": (
        "Logits of 12 queries and 12 keys of 64 features before and after scaling, on one colour"
        " scale, and their weights: raw logits make nearly one-hot rows, scaled ones soft rows."
    ),
    "score_variance_means": (
        "Variance of scaled logits for six choices of means, tokens raw, divided by their root mean"
        " square, or after LayerNorm; over all pairs and within a row. Bars are samples, black"
        " marks the formula."
    ),
    "score_variance_scores": (
        "Variance of each score's logits at initialisation against the number of features D, over"
        " all pairs and within a row. Markers of one D stand side by side, so that none is hidden."
    ),
}

# No score has these colours.
_NORMALISATION_COLORS = (*plotting.COLORS[FIRST_FREE : FIRST_FREE + 2], "#999999")
_NORMALISATIONS = {"none": "tokens as they are", "rms": "root mean square 1", "layer": "LayerNorm"}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws deviations, heat maps, means and initial variances."""
    return {
        "score_variance": _deviations(numbers),
        "score_variance_heatmaps": _heatmaps(numbers["heatmaps"]),
        "score_variance_means": _cases(numbers["cases"], numbers["config"]["case_dim"]),
        "score_variance_scores": _initial(numbers["initial"], numbers["additive_row_variance"]),
    }


def _deviations(numbers: JSON) -> Figure:
    figure, (grown, ratio) = plotting.new_figure(9.5, 4.6, columns=2)
    drawn, printed = numbers["dot_products"], numbers["source_deviations"]
    dims = np.array([of_dim["dim"] for of_dim in drawn])
    source_dims = np.array([int(dim) for dim in printed])
    source = np.array(list(printed.values()))
    labels = {"dot": "s · h", "scaled": "s · h / √D"}
    for name, index in score_indices(labels).items():
        values = np.array([of_dim[name]["deviation"] for of_dim in drawn])
        label = f"{labels[name]}: mean ± sd over draws"
        plotting.draw_band(grown, dims.tolist(), values, index=index, label=label)
        if name == "dot":
            relative = values / np.sqrt(dims)[:, None]
            plotting.draw_band(
                ratio, dims.tolist(), relative, index=index, label="mean ± sd over draws"
            )
    grown.plot(dims, np.sqrt(dims), "--", color="black", linewidth=1, label="√D", zorder=3)
    for ax, of_source in ((grown, source), (ratio, source / np.sqrt(source_dims))):
        label = "the source's own draws"
        ax.plot(source_dims, of_source, "x", color="black", markersize=9, label=label)
        ax.axhline(1, color="gray", linestyle=":", zorder=0)
        ax.set(xscale="log", xlabel="features D of query and key")
        ax.set_xticks(dims, [str(dim) for dim in dims])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend()
    grown.set(
        yscale="log",
        ylabel="standard deviation of the logits",
        title="dot products grow as √D,\ndivided by √D they do not",
    )
    config = numbers["config"]
    ratio.set(
        ylabel="standard deviation of s · h, divided by √D",
        title=f"the same up close:\n{config['draws']} draws of {config['samples']:,} pairs",
    )
    return figure


def _heatmaps(maps: JSON) -> Figure:
    figure, axes = plotting.new_figure(8.4, 7.6, rows=2, columns=2)
    limit = np.abs(maps["dot"]["logits"]).max()
    titles = {"dot": "before scaling", "scaled": "after scaling"}
    for ax, (name, title) in zip(axes[:2], titles.items(), strict=True):
        logits = ax.imshow(maps[name]["logits"], cmap="RdBu_r", vmin=-limit, vmax=limit)
        ax.set_title(f"logits {title}\nvariance {maps[name]['variance']:.2f}")
    for ax, (name, title) in zip(axes[2:], titles.items(), strict=True):
        table = np.array(maps[name]["weights"])
        weights = ax.imshow(table, cmap="viridis", vmin=0, vmax=1)
        ax.set_title(
            f"weights {title}\nlargest of a row: {table.max(axis=1).mean():.2f} on average"
        )
    for ax in axes:
        ax.set(xlabel="key", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
    for ax in axes[::2]:
        ax.set_ylabel("query")
    figure.colorbar(logits, ax=axes[:2], label="logit", shrink=0.9)
    figure.colorbar(weights, ax=axes[2:], label="attention weight", shrink=0.9)
    figure.suptitle("Unit-variance queries and keys of 64 features")
    return figure


def _cases(cases: JSON, dim: int) -> Figure:
    figure, axes = plotting.new_figure(9.5, 6.6, rows=2, sharex=True, sharey=True)
    labels = {
        "no means": "no means",
        "query": "query\nmean 1",
        "key": "key\nmean 1",
        "both": "both\nmean 1",
        "unequal": "query mean 2,\nkey mean -1,\nkey sd 0.5",
        "by feature": "each feature\nits own mean",
    }
    titles = {"pairs": "over all pairs", "row": "within a row, which is what the softmax sees"}
    positions, width = np.arange(len(cases)), 0.26
    for ax, (where, title) in zip(axes, titles.items(), strict=True):
        for index, (normalisation, label) in enumerate(_NORMALISATIONS.items()):
            measured = [case[normalisation] for case in cases.values()]
            x = positions + (index - 1) * width
            ax.bar(
                x, [np.mean(of_case[where]) for of_case in measured], width * 0.92, label=label,
                color=_NORMALISATION_COLORS[index],
            )  # fmt: skip
            ax.plot(
                x, [of_case[f"{where}_formula"] for of_case in measured], "_", color="black",
                markersize=13, markeredgewidth=2, label="formula" if index == 2 else None,
            )  # fmt: skip
        ax.axhline(1, color="gray", linestyle=":", zorder=0)
        ax.set(ylabel="variance of the logits", title=title)
        ax.grid(alpha=0.3, axis="y")
    axes[1].set_xticks(positions, [labels[name] for name in cases])
    axes[0].set_ylim(0, 4.6)
    axes[0].legend(ncols=4, loc="upper left")
    figure.suptitle(f"Scaled dot products of tokens whose features have means (D = {dim})")
    return figure


def _initial(initial: JSON, additive_row: float) -> Figure:
    figure, axes = plotting.new_figure(9.5, 4.4, columns=2, sharey=True)
    titles = {"pairs": "over all pairs and initialisations", "row": "within a row"}
    indices = score_indices(initial)
    for ax, (where, title) in zip(axes, titles.items(), strict=True):
        for shift, (name, by_dim) in enumerate(initial.items()):
            dims = np.array([of_dim["dim"] for of_dim in by_dim])
            mean, deviation = (
                np.array([of_dim[where][number] for of_dim in by_dim])
                for number in ("mean", "deviation")
            )
            low = np.maximum(mean - deviation, mean / 100)  # a variance is positive
            index = indices[name]
            ax.errorbar(
                dims * 1.12 ** (shift - (len(initial) - 1) / 2),
                mean,
                (mean - low, deviation),
                linestyle="",
                color=plotting.COLORS[index % len(plotting.COLORS)],
                marker=plotting.MARKERS[index % len(plotting.MARKERS)],
                label=name,
            )
        ax.set(xscale="log", yscale="log", xlabel="features D", title=title)
        ax.set_xticks(dims, [str(dim) for dim in dims])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    if "additive" in initial:
        label = f"additive, by formula: {additive_row:.2f}"
        axes[1].axhline(additive_row, color="black", linestyle=":", label=label)
    axes[0].set_ylabel("variance of the logits")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
    figure.suptitle("Logits of fresh scores, unit-variance tokens (mean ± sd over initialisations)")
    return figure
