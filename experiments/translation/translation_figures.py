"""Figures of translation_comparison.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.score_colors import score_indices

CAPTIONS = {
    "translation_training": "Validation of translators that differ in the score of their cross"
    " attention, or in the number of batches: negative log-likelihood in nats per subword, and"
    " BLEU of greedy translations.",
    "translation_heatmaps": "Cross attention of the decoder while it translates the same sentences:"
    " means over layers and heads, two scores side by side.",
    "translation_heads": "Every head of the cross attention: how much it aligns, the mean of its"
    " rows' largest weights, and how much it spreads, the mean entropy of its rows over that of"
    " uniform rows.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws training, heat maps and heads."""
    return {
        "translation_training": _training(numbers["arms"]),
        "translation_heatmaps": _heatmaps(
            {name: arm for name, arm in numbers["arms"].items() if arm["drawn"]}
        ),
        "translation_heads": _heads(numbers["arms"]),
    }


def _training(arms: JSON) -> Figure:
    figure, (loss, bleu) = plotting.new_figure(9, 3.6, columns=2)
    for score, index in score_indices(arms).items():
        training = arms[score]["training"]
        for axes, name in ((loss, "validation_negative_log_likelihood"), (bleu, "validation_bleu")):
            values = np.array(training[name])
            plotting.draw_band(axes, training["validated"], values, index=index, label=score)
    loss.set_ylabel("nats per subword")
    bleu.set_ylabel("BLEU, greedy")
    for axes in (loss, bleu):
        axes.set_xlabel("batches")
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure


def _heatmaps(arms: JSON) -> Figure:
    panels = {}
    longest = 0  # of all axes: every panel has room for its labels
    for index in range(len(next(iter(arms.values()))["drawn"])):
        for score, arm in arms.items():
            drawn = arm["drawn"][index]
            weights = np.array(drawn["weights"])
            longest = max(longest, *weights.shape)
            panels[f"{score}, sentence {index + 1}"] = (weights, drawn["rows"], drawn["columns"])
    figure = plotting.weight_heatmaps(
        panels,
        columns=len(arms),
        ylabel="subword written (query)",
        xlabel="source subword (key)",
        size=max(3.1, 0.24 * longest),
    )
    for axes in figure.axes:
        if axes.images:
            axes.set_aspect("auto")  # panels of one size, whatever the lengths of the sentences
            axes.tick_params(labelsize=8)
    figure.align_labels()
    return figure


def _heads(arms: JSON) -> Figure:
    figure, (axes,) = plotting.new_figure(6.8, 4.2)
    for score, index in score_indices(arms).items():
        measured = arms[score]["heads"]
        for layer, (sharpness, spread) in enumerate(
            zip(measured["sharpness"], measured["spread"], strict=True)
        ):
            axes.scatter(
                sharpness, spread, color=plotting.COLORS[index % len(plotting.COLORS)],
                marker=plotting.MARKERS[layer % len(plotting.MARKERS)], alpha=0.8,
                label=f"{score}, layer {layer + 1}",
            )  # fmt: skip
    axes.set_xlabel("mean largest weight: aligns")
    axes.set_ylabel("mean entropy / uniform: spreads")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure
