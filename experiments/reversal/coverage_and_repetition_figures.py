"""Figures of coverage_and_repetition.py, drawn from its numbers alone."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.reversal.curves import draw_band

CAPTIONS = {
    "coverage_stuck": (
        "Attention of a decoder whose query never changes, over four keys and four queries. Without"
        " coverage every row is the same; with a negative kernel in the score attention moves from"
        " key to key. The coverage loss falls from 3 as the kernel gets more negative, is least at"
        " -2, and rises again where tanh saturates."
    ),
    "coverage": (
        "Six panels per score against the training step: without coverage, with coverage in the"
        " score, and with the coverage loss as well. At trained lengths the coverage loss per"
        " string falls to its floor of 1 in the arm that trains on it, and stays above it in the"
        " others; weight beyond 1 per letter, right answers and wrong repetitions end alike. On"
        " longer strings the arm with the coverage loss repeats the fewest letters wrongly. Bands:"
        " one deviation over seeds."
    ),
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the stuck decoder, and what models do throughout training."""
    return {"coverage_stuck": _stuck(numbers["stuck"]), "coverage": _learning(numbers)}


def _stuck(stuck: list[JSON]) -> Figure:
    figure, (plain, moving, losses) = plotting.new_figure(
        10.5, 4.2, columns=3, width_ratios=(1, 1, 1.5)
    )
    shown = (stuck[0], min(stuck[1:], key=lambda decoder: sum(decoder["loss"])))
    for ax, decoder in zip((plain, moving), shown, strict=True):
        weights = np.array(decoder["weights"])
        labels = [range(1, size + 1) for size in weights.shape]
        image = plotting.draw_weights(ax, weights, *[[str(n) for n in side] for side in labels])
        for (row, column), weight in np.ndenumerate(weights):
            color = "black" if weight > 0.6 else "white"
            ax.text(column, row, f"{weight:.2f}", ha="center", va="center", color=color, size=9)
        ax.set(xlabel="key", title=f"w = {decoder['kernel']:g}, loss {sum(decoder['loss']):.2f}")
    plain.set_ylabel("query (always the same)")
    figure.colorbar(image, ax=[plain, moving], label="attention weight", shrink=0.8)
    queries, keys = weights.shape
    kernels = [decoder["kernel"] for decoder in stuck]
    losses.plot(
        kernels, [sum(decoder["loss"]) for decoder in stuck], color=plotting.COLORS[3], marker="o",
        linestyle="",
        label="coverage loss of all queries",
    )  # fmt: skip
    spread = [max(decoder["coverage"]) - min(decoder["coverage"]) for decoder in stuck]
    losses.plot(
        kernels, spread, color=plotting.COLORS[4], marker="s", linestyle="",
        label="largest - smallest coverage of a key",
    )  # fmt: skip
    losses.axhline(
        queries - keys,
        color="black",
        linestyle="--",
        label=f"floor: {queries} queries, {keys} keys",
    )
    losses.set(
        xlabel="coverage kernel w", ylabel="sum of weights", ylim=(-0.15, None),
        title="A stuck decoder moves on\nif covered keys lose score",
    )  # fmt: skip
    losses.invert_xaxis()
    losses.grid(alpha=0.3)
    losses.legend(loc="upper right", fontsize=9)
    return figure


FLOOR = 1.0  # of coverage loss and excess, per string


def _learning(numbers: JSON) -> Figure:
    scores = numbers["arms"]
    figure, axes = plotting.new_figure(
        8.6, 4.4 * len(scores) + 0.6, rows=2 * len(scores), columns=3, sharex=True
    )
    for row, (score, arms) in enumerate(scores.items()):
        _draw_learning(axes[6 * row : 6 * row + 6], score, arms, numbers)
    for ax in axes[-3:]:
        ax.set_xlabel("step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"Attention learns to reverse, with coverage and without"
        f" ({numbers['config']['seeds']} seeds; bands: one deviation, within the possible range)",
        fontsize=11,
    )
    return figure


def _draw_learning(axes: list[Axes], score: str, arms: JSON, numbers: JSON) -> None:
    far = f"{numbers['config']['far_length']} letters"
    panels = (
        ("trained lengths", "coverage_loss", "coverage loss per string", "Σ min(α, cov)"),
        ("trained lengths", "excess", "weight beyond 1 per letter", "Σ max(0, cov - 1)"),
        ("trained lengths", "exact_match", "right answers", "share of strings"),
        ("trained lengths", "repeated", "wrong repetitions", "share of letters written"),
        ("longer", "repeated", f"the same, {far}", "share of letters written"),
        ("longer", "coverage_loss", f"coverage loss, {far}", "Σ min(α, cov)"),
    )
    for ax, (strings, name, title, ylabel) in zip(axes, panels, strict=True):
        floored = name in ("coverage_loss", "excess")
        for index, (arm, looks) in enumerate(arms.items()):
            draw_band(
                ax, numbers["looks"], np.array(looks[strings][name]), index=index, label=arm,
                least=FLOOR if floored else 0, most=math.inf if floored else 1,
            )  # fmt: skip
        ax.set(ylabel=ylabel, ylim=(0, None))
        ax.set_title(f"{score}: {title}", fontsize=9)
        if floored:
            ax.axhline(FLOOR, color="black", linestyle="--", linewidth=1, label="floor")
        if name == "repeated":
            ax.set_ylim(0, 0.12)  # all arms begin at about one half
        ax.grid(alpha=0.3)
