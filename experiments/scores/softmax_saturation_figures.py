"""Figures of softmax_saturation.py, drawn from its numbers alone."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.entropy_limits import expected_maximum
from experiments.experiment import JSON
from experiments.score_colors import FIRST_FREE, ordered_colors

CAPTIONS = {
    "softmax_saturation": (
        "Norm of the gradient of the largest weight against the scale of the scores. Left, scores"
        " evenly from -1 to 1, as in the chapter, with the norm of the whole Jacobian and the"
        " chapter's reading. Right, scores of random queries: mean, median, and the range from 10"
        " to 90 % of the queries."
    ),
    "softmax_saturation_curves": (
        "Weights of ten keys in falling order, for several key dimensions. Raw, the largest weight"
        " goes to 1 as the dimension grows. Scaled, the curves coincide."
    ),
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the gradient norms and the softmax curves."""
    return {
        "softmax_saturation": _gradient_figure(numbers),
        "softmax_saturation_curves": _curve_figure(numbers),
    }


def _gradient_figure(numbers: JSON) -> Figure:
    scales, even, random = numbers["scales"], numbers["even"], numbers["random"]
    keys = numbers["config"]["keys"]
    color, jacobian_color, median_color = plotting.COLORS[FIRST_FREE:]
    figure, (left, right) = plotting.new_figure(11, 4.5, columns=2, sharey=True)
    left.plot(scales, even["gradient_norm"], color=color, label="gradient of the largest weight")
    left.plot(
        scales,
        even["jacobian_norm"],
        "--",
        color=jacobian_color,
        label="whole Jacobian (Frobenius)",
    )
    left.axvline(even["peak_scale"], color=color, lw=1, alpha=0.6)
    left.text(
        even["peak_scale"] + 0.2,
        0.02,
        f"peak at {even['peak_scale']:.1f}",
        color=color,
        fontsize=10,
    )
    left.axvline(1, color="gray", ls=":", label="the chapter's reading: peak near 1,")
    left.axvline(10, color="gray", ls="-.", label="near zero from 10 on")
    left.set_title(f"{keys} scores evenly from -1 to 1, times the scale")
    right.fill_between(
        scales, random["low"], random["high"], color=color, alpha=0.2, linewidth=0,
        label="10 to 90 % of the queries",
    )  # fmt: skip
    right.plot(scales, random["mean"], color=color, label="mean")
    right.plot(scales, random["median"], color=median_color, ls="--", label="median")
    limit = expected_maximum(keys) / math.sqrt(2)
    tail = [scale for scale in scales if limit / scale < 0.3]
    right.plot(
        tail, [limit / c for c in tail], ":", color="gray", lw=2.5, label=r"$m_T / (\sqrt{2}\,c)$"
    )
    right.set_title(f"{numbers['config']['samples']} random queries, {keys} keys each")
    right.secondary_xaxis(-0.2, functions=(np.square, np.sqrt)).set_xlabel(
        "$d_k$ of raw dot products with that deviation"
    )
    for ax in (left, right):
        ax.set_ylim(0, 0.6)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9, loc="upper right")
    left.set(xlabel="scale c of the scores", ylabel="norm of the gradient in the scores")
    right.set(xlabel="scale c, the scores' standard deviation")
    return figure


def _curve_figure(numbers: JSON) -> Figure:
    config = numbers["config"]
    figure, axes = plotting.new_figure(10, 4.2, columns=2, sharey=True)
    ranks = np.arange(1, config["curve_keys"] + 1)
    colors = ordered_colors(len(config["curve_dims"]))
    for ax, arm in zip(axes, ("raw", "scaled"), strict=True):
        for index, (dim, of_dim) in enumerate(
            zip(config["curve_dims"], numbers["curves"], strict=True)
        ):
            weights = of_dim[arm]
            # Side by side, so that curves that coincide are seen.
            x = ranks + 0.1 * (index - (len(colors) - 1) / 2)
            marker = plotting.MARKERS[index % len(plotting.MARKERS)]
            ax.plot(
                x, weights["mean"], color=colors[index], marker=marker, markersize=5,
                label=f"$d_k$ = {dim}",
            )  # fmt: skip
            low, high = weights["low"], weights["high"]
            ax.fill_between(x, low, high, color=colors[index], alpha=0.1, linewidth=0)
        ax.set_xticks(ranks)
        ax.set_ylim(0, 1.05)
        ax.set(xlabel="key, by falling weight", title=f"{arm} dot products")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=10)
    axes[0].set_ylabel("attention weight")
    figure.suptitle(
        f"Attention over {config['curve_keys']} random keys: mean of {config['samples']} queries "
        "(bands: 10 to 90 %)"
    )
    return figure
