"""Figures of qkv_walkthrough.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.score_colors import FIRST_FREE

CAPTIONS = {
    "qkv_walkthrough": (
        "Heat maps of eight steps: embeddings, Q, K, V, compatibility, scaling, weights and context"
        " vectors, with shapes and variances; projections preserve variance 1 and weights are soft."
    ),
    "qkv_walkthrough_source": (
        "The same eight steps with the source's random numbers: the variance of the scaled"
        " compatibility is in the hundreds, and most rows of weights are one-hot; some are shared"
        " by the token that comes twice."
    ),
    "qkv_walkthrough_axis": (
        "Weights of the source's softmax over dim 0, whose columns sum to 1, and of the softmax"
        " over rows, whose rows sum to 1. All sums are written at the sides."
    ),
    "qkv_walkthrough_variances": (
        "Variance at each step in many draws, on a logarithmic axis: with projections of variance 1"
        " it is large after scaling, too; with 1 / D it is about 1 there."
    ),
}

_TITLES = {
    "embedding": "1. embeddings X",
    "Q": "2. queries Q = X $W_q$",
    "K": "2. keys K = X $W_k$",
    "V": "2. values V = X $W_v$",
    "compatibility": "3. compatibility $QK^T$",
    "scaled": "4. scaled, $QK^T/\\sqrt{32}$",
    "weights": "5. weights, softmax of rows",
    "context": "6. context, weights V",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the steps of both recipes, both axes of the softmax, and the variances."""
    return {
        "qkv_walkthrough": _steps(
            numbers, "ours", "From token ids to context; projections with entries of variance 1 / D"
        ),
        "qkv_walkthrough_source": _steps(
            numbers, "source", "The source's own numbers; projections with entries of variance 1"
        ),
        "qkv_walkthrough_axis": _axis(numbers),
        "qkv_walkthrough_variances": _variances(numbers),
    }


def _steps(numbers: JSON, recipe: str, title: str) -> Figure:
    figure, axes = plotting.new_figure(10, 5.8, rows=2, columns=4)
    tokens = [str(token) for token in numbers["token_ids"]]
    described = numbers[recipe]
    for ax, (name, step) in zip(axes, described["steps"].items(), strict=True):
        values = np.array(step["values"])
        limit = np.abs(values).max()
        style = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
        if name == "weights":
            style = {"cmap": "viridis", "vmin": 0, "vmax": 1}
        image = ax.imshow(values, aspect="auto", interpolation="nearest", **style)
        rows, columns = step["shape"]
        digits = 2 if step["variance"] >= 1 else 4
        variance = f"{step['variance']:,.{digits}f}"
        ax.set_title(f"{_TITLES[name]}\n[{rows}, {columns}], variance {variance}", fontsize=10)
        ax.set_yticks(range(len(tokens)), tokens)
        if columns == len(tokens):
            ax.set_xticks(range(len(tokens)), tokens, fontsize=8)
            ax.set_xlabel("key (token id)")
        else:
            ax.set_xlabel("feature")
        figure.colorbar(image, ax=ax, shrink=0.8)
    for ax in axes[::4]:
        ax.set_ylabel("token id, in order")
    figure.suptitle(
        f"{title}\nrows of weights: largest {described['largest_weight']:.2f}, entropy"
        f" {described['entropy']:.2f} nats of at most {np.log(len(tokens)):.2f}, on average"
    )
    return figure


def _axis(numbers: JSON) -> Figure:
    figure, axes = plotting.new_figure(9.5, 4.9, columns=2)
    tokens = [str(token) for token in numbers["token_ids"]]
    titles = {"source": "softmax over dim 0, as the source's code", "ours": "softmax over rows"}
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        table = numbers["axis"][name]
        image = plotting.draw_weights(ax, np.array(table["weights"]), tokens, tokens)
        row_sums = [f"{total:.2f}" for total in table["row_sums"]]
        ax.set_yticks(range(len(tokens)), tokens)
        ax.set(xlabel="key (token id)", ylabel="query (token id)", title=title)
        for index, total in enumerate(row_sums):
            ax.text(len(tokens) - 0.3, index, total, va="center")
        for index, total in enumerate(table["column_sums"]):
            ax.text(index, -0.7, f"{total:.1f}", ha="center", va="bottom", rotation=90)
        ax.set_title(f"{title}\nsums of rows at the right, of columns on top", pad=34)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.7)
    return figure


def _variances(numbers: JSON) -> Figure:
    figure, (ax,) = plotting.new_figure(9, 4.6)
    names = list(_TITLES)
    labels = {"source": "projections of variance 1 (the source)", "ours": "of variance 1 / D"}
    for index, (recipe, label) in enumerate(labels.items(), start=FIRST_FREE):
        low, middle, high = np.array(
            [numbers["draws"][recipe][name]["quantiles"] for name in names]
        ).T
        color = plotting.COLORS[index]
        ax.plot(names, middle, color=color, marker=plotting.MARKERS[index], label=label)
        ax.fill_between(names, low, high, color=color, alpha=0.2, linewidth=0)
    printed = [numbers["source"]["steps"][name]["variance"] for name in names]
    ax.plot(names, printed, "x", color="black", markersize=9, label="the source's own draw")
    ax.axhline(1, color="gray", linestyle=":", zorder=0)
    ax.set(
        yscale="log",
        ylabel="variance of all entries",
        title="How large the numbers are at each step\n(median; bands: 95 % of"
        f" {numbers['config']['draws']} draws)",
    )
    ax.grid(alpha=0.3)
    ax.legend()
    return figure
