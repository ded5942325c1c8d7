"""Figures of geometry.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.score_colors import ordered_colors, score_indices

CAPTIONS = {
    "geometry_scale": (
        "Largest weight and norm of the softmax's Jacobian against the length of orthogonal keys,"
        " for each score: dot, then scaled, then general go from uniform to one-hot and lose their"
        " gradient; additive attention levels off far from one-hot, and its softmax keeps passing"
        " gradients."
    ),
    "geometry_angle": (
        "Weights of two orthogonal keys while the query turns from one to the other, for four key"
        " scales: a slow change for short keys, a switch at 45 degrees for long ones. Only there is"
        " any gradient left."
    ),
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the sweep over key scales and the sweep over angles."""
    return {"geometry_scale": _scales(numbers), "geometry_angle": _angles(numbers["angles"])}


def _scales(numbers: JSON) -> Figure:
    figure, (top, bottom) = plotting.new_figure(8, 7.4, rows=2, sharex=True)
    scales = numbers["key_scales"][1:]  # without 0, on a logarithmic axis
    indices = score_indices(numbers["scales"])
    for shift, (name, sweep) in enumerate(numbers["scales"].items()):
        color = plotting.COLORS[indices[name] % len(plotting.COLORS)]
        marker = plotting.MARKERS[indices[name] % len(plotting.MARKERS)]
        for ax, what in ((top, "largest_weight"), (bottom, "jacobian_norm")):
            low, middle, high = (
                np.maximum(sweep[what][curve][1:], 1e-12) for curve in ("low", "median", "high")
            )
            # Markers at different scales, so that curves that coincide are seen.
            marked = (2 * shift % 6, 6)
            ax.plot(scales, middle, color=color, marker=marker, markevery=marked, label=name)
            ax.fill_between(scales, low, high, color=color, alpha=0.2, linewidth=0)
    length, dim = numbers["config"]["source_length"], numbers["config"]["dim"]
    uniform = np.sqrt(length - 1) / length
    top.axhline(1 / length, color="gray", linestyle=":", label="uniform weights")
    if numbers["additive_limit"] is not None:
        label = "additive, infinitely long keys (mean)"
        top.axhline(numbers["additive_limit"], color="black", ls="--", linewidth=1, label=label)
    bottom.axhline(uniform, color="gray", linestyle=":")
    top.set(
        ylabel="largest weight",
        ylim=(0, 1.03),
        title=f"One query, {length} orthogonal keys of {dim} features that grow longer\n"
        f"(median; bands: 95 % of {numbers['config']['draws']} draws)",
    )
    bottom.set(
        xscale="log",
        yscale="log",
        ylim=(1e-8, 1),
        xlabel="key scale (1: features of variance 1)",
        ylabel="norm of d weights / d logits",
    )
    for ax in (top, bottom):
        ax.grid(alpha=0.3)
    handles, labels = top.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _angles(sweep: JSON) -> Figure:
    figure, (top, bottom) = plotting.new_figure(8, 6.8, rows=2, sharex=True)
    colors = ordered_colors(len(sweep["scales"]))
    for color, (scale, curves) in zip(colors, sweep["scales"].items(), strict=True):
        top.plot(sweep["degrees"], curves["first"], color=color, label=f"key scale {scale}")
        top.plot(sweep["degrees"], curves["second"], color=color, linestyle="--")
        bottom.plot(sweep["degrees"], curves["jacobian_norm"], color=color)
    top.set(
        ylabel="weight of the first key (solid)\nand of the second (dashed)",
        title="A query turns from one key to another, scaled dot product",
    )
    bottom.set(
        xlabel="angle between the query and the first key (degrees)",
        ylabel="norm of d weights / d logits",
        xticks=range(0, 91, 15),
        ylim=(0, 0.53),
    )
    for ax in (top, bottom):
        ax.grid(alpha=0.3)
    handles, labels = top.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure
