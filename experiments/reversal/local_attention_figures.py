"""Figures of local_attention.py, drawn from its numbers alone."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.reversal.arms import TRAINED_LENGTHS, mean_over_lengths
from experiments.reversal.curves import BARS, draw_shares
from experiments.reversal.strings import LETTER_AXES

CAPTIONS = {
    "local_attention": (
        "Exact match against the radius of the window. Without an encoder, windows around the"
        " anti-diagonal reverse every string at radius 0, and fewer strings the wider they are;"
        " windows around the diagonal follow their ceiling; windows around a predicted center need"
        " radius 2. With an encoder both reverse, the diagonal less well. By length, the diagonal"
        " reverses most strings up to D + 1 letters and no longer ones. Bars: one deviation over"
        " seeds."
    ),
    "local_attention_masks": (
        "The chapter's masks of 16 queries and 20 keys with radius 3: global, local-m along the"
        " diagonal, local-p with noise, and the anti-diagonal that reversal needs; uniform weights"
        " times a Gaussian around predicted centers, whose rows sum to less than 1; and the sum of"
        " a row's weights by radius, 0.42 to 0.60."
    ),
    "local_attention_weights": (
        "Attention weights of trained models while they write a word backwards. In windows around"
        " the anti-diagonal and predicted centers, attention is spread and mostly heaviest on the"
        " letter to write. Windows around the diagonal mostly do not hold that letter: without an"
        " encoder the model writes others; with an encoder attention follows the diagonal, where"
        " the encoder has carried the letters."
    ),
}

EXACT = "free_running_exact"
_ENCODERS = {"no encoder": "Without an encoder", "encoder": "With an encoder"}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws accuracy, masks and weights."""
    figures = (_accuracy(numbers), _masks(numbers), _weights(numbers))
    return dict(zip(CAPTIONS, figures, strict=True))


def _accuracy(numbers: JSON) -> Figure:
    scores, config = numbers["arms"], numbers["config"]
    figure, axes = plotting.new_figure(
        9.6, 3.8 * len(scores) + 0.4, rows=len(scores), columns=3, sharey=True
    )
    for row, (score, arms) in enumerate(scores.items()):
        _draw_accuracy(axes[3 * row : 3 * row + 3], arms, numbers)
        axes[3 * row].set(ylabel=f"{score}: exact match (share of strings)", ylim=(-0.04, 1.06))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"Strings of {TRAINED_LENGTHS[0]} to {TRAINED_LENGTHS[-1]} letters reversed through a"
        f" window, {config['seeds']} seeds\n({BARS})",
        fontsize=11,
    )
    return figure


def _draw_accuracy(axes: list[Axes], arms: JSON, numbers: JSON) -> None:
    """One score: by radius without and with an encoder, and by length around the diagonal."""
    centers = ("anti-diagonal", "diagonal", "predicted")
    for ax, (encoder, title) in zip(axes, _ENCODERS.items(), strict=False):
        for index, center in enumerate(centers):
            by_radius = arms.get(f"{encoder}, {center}", {})
            if by_radius:
                exact = np.array([_exact(arm) for arm in by_radius.values()])
                label = "predicted center" if center == "predicted" else center
                x = [int(radius) for radius in by_radius]
                draw_shares(ax, x, exact, index=index, count=len(centers), label=label)
        ax.set(title=title, xlabel="radius D of the window (keys)")
    radii = numbers["config"]["radii"]
    axes[0].set_xticks(radii)
    axes[1].set_xticks(numbers["config"]["encoder_radii"])
    ceiling = [np.mean(numbers["ceiling"][str(radius)]) for radius in radii]
    axes[0].plot(radii, ceiling, "k_", markersize=16, label="the most that the diagonal can")
    diagonal = arms["no encoder, diagonal"]
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(diagonal)))
    for index, (radius, arm) in enumerate(diagonal.items()):
        by_length = arm["accuracy"][EXACT]
        x, exact = [int(length) for length in by_length], np.array(list(by_length.values()))
        draw_shares(
            axes[2], x, exact, index=index, count=len(diagonal), label=f"D = {radius}",
            color=shades[index], connected=True,
        )  # fmt: skip
    axes[2].set(title="Diagonal, without an encoder", xlabel="length of the string (letters)")
    axes[2].legend(loc="upper right", fontsize=8)
    for ax in axes:
        ax.grid(alpha=0.3)


def _masks(numbers: JSON) -> Figure:
    masks = numbers["masks"]
    figure, axes = plotting.new_figure(8.6, 5.2, rows=2, columns=3)
    titles = {
        "global": "Global",
        "local-m": "Local-m, along the diagonal",
        "local-p": "Local-p, as in the chapter",
        "anti-diagonal": "Local-m, anti-diagonal",
    }
    colors = ListedColormap(["white", plotting.COLORS[0]])
    for ax, (name, pairs) in zip(axes, masks["pairs"].items(), strict=False):
        ax.imshow(pairs, cmap=colors, vmin=0, vmax=1, interpolation="nearest")
        share = 100 * np.mean(pairs)
        ax.set_title(f"{titles[name]}\n{share:.0f} % of the pairs", fontsize=10)
        _label_pairs(ax)
    gaussian, row_sums = axes[4:]
    weights = np.array(masks["gaussian_weights"])
    image = gaussian.imshow(weights, cmap="viridis", vmin=0, interpolation="nearest")
    gaussian.plot(
        masks["gaussian_centers"], range(len(weights)), ".", color="white", label="center p"
    )
    sums = weights.sum(axis=-1)
    title = f"Local-p with its Gaussian:\nrows sum to {sums.min():.2f}-{sums.max():.2f}"
    gaussian.set_title(title, fontsize=10)
    gaussian.legend(loc="upper right", facecolor="gray", labelcolor="white", framealpha=0.6)
    _label_pairs(gaussian)
    figure.colorbar(image, ax=gaussian, shrink=0.7, label="attention weight")
    _draw_row_sums(row_sums, numbers)
    return figure


def _draw_row_sums(axes: Axes, numbers: JSON) -> None:
    radii = [drawn["radius"] for drawn in numbers["gaussian"]]
    # Colors 0 to 2 are those of the three kinds of centers in the other figures.
    for index, place in ((3, "on a key"), (4, "between keys")):
        drawn = [of_radius[place] for of_radius in numbers["gaussian"]]
        axes.errorbar(
            radii, [mass["mean"] for mass in drawn],
            yerr=[1.96 * mass["standard_error"] for mass in drawn],
            color=plotting.COLORS[index], marker=plotting.MARKERS[index], linestyle="",
            label=f"random, center {place}",
        )  # fmt: skip
        formula = [mass["formula"] for mass in drawn]
        axes.plot(radii, formula, "_", color=plotting.COLORS[index], markersize=18)
    trained = next(iter(numbers["arms"].values()))["no encoder, predicted"]
    sums = np.array([arm["weight"] for arm in trained.values()])
    x = [int(radius) for radius in trained]
    draw_shares(axes, x, sums, index=2, place=1, count=2, label="trained, no encoder")
    axes.set(
        title="With the Gaussian\n(wide strokes: formulas)",
        xlabel="radius D (keys)", ylabel="sum of a row's weights", xticks=radii, ylim=(0, 1.03),
    )  # fmt: skip
    axes.title.set_fontsize(10)
    axes.legend(loc="lower center", fontsize=7)
    axes.grid(alpha=0.3)


def _weights(numbers: JSON) -> Figure:
    word = list(numbers["config"]["word"])
    config = numbers["config"]
    radius = max(set(config["radii"]) & set(config["encoder_radii"]))  # the largest of all arms
    panels = {}
    score, arms = next(iter(numbers["arms"].items()))
    for arm, by_radius in arms.items():
        measured = by_radius[str(radius)]
        panels[arm] = (
            np.array(measured["weights"]).reshape(-1, len(word)), measured["row_labels"], word,
        )  # fmt: skip
    figure = plotting.weight_heatmaps(panels, columns=3, size=2.6, **LETTER_AXES)
    figure.suptitle(f"Attention of trained models ({score}), through windows of radius {radius}")
    return figure


def _label_pairs(axes: Axes) -> None:
    axes.set(xlabel="source position j (key)", ylabel="target position i")
    axes.set(xticks=range(0, 20, 5), yticks=range(0, 16, 5))


def _exact(arm: JSON) -> np.ndarray:
    return mean_over_lengths(arm["accuracy"], EXACT, TRAINED_LENGTHS)
