"""Figures of coverage_and_repetition.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON

CAPTIONS = {
    "coverage_stuck": (
        "Attention of a decoder whose query never changes, over four keys and four queries. Without"
        " coverage every row is the same; with a negative kernel in the score attention moves from"
        " key to key. The coverage loss falls from 3 as the kernel gets more negative, is least at"
        " -2, and rises again where tanh saturates."
    ),
    "coverage": (
        "Six panels against the training step: without coverage, with coverage in the score, and"
        " with the coverage loss as well. At trained lengths the coverage loss per string falls to"
        " its floor of 1 in the arm that trains on it, and levels off at 1.9 and 3.1 in the others;"
        " excess of attention, right answers and repeated letters end alike. On strings of ten"
        " letters the arm with the coverage loss repeats the fewest letters wrongly. Bands: one"
        " deviation over seeds."
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
        kernels, [sum(decoder["loss"]) for decoder in stuck], color=plotting.COLORS[0], marker="o",
        label="coverage loss of all queries",
    )  # fmt: skip
    spread = [max(decoder["coverage"]) - min(decoder["coverage"]) for decoder in stuck]
    losses.plot(
        kernels, spread, color=plotting.COLORS[1], marker="s",
        label="coverage, most - least of a key",
    )  # fmt: skip
    losses.axhline(
        queries - keys,
        color="black",
        linestyle="--",
        label=f"floor: {queries} queries, {keys} keys",
    )
    losses.set(
        xlabel="coverage kernel w", ylim=(-0.15, None),
        title="A stuck decoder moves on\nif covered keys lose score",
    )  # fmt: skip
    losses.invert_xaxis()
    losses.grid(alpha=0.3)
    losses.legend(loc="upper right", fontsize=9)
    return figure


def _learning(numbers: JSON) -> Figure:
    figure, axes = plotting.new_figure(8.6, 5, rows=2, columns=3, sharex=True)
    far = numbers["config"]["far_length"]
    panels = (
        ("trained lengths", "coverage_loss", "Coverage loss of a string", "Σ min(α, cov)"),
        ("trained lengths", "excess", "Attention beyond 1 a letter", "Σ max(0, cov - 1)"),
        ("trained lengths", "exact_match", "Right answers", "share of strings"),
        ("trained lengths", "repeated", "Letters repeated wrongly", "share of letters written"),
        ("longer", "repeated", f"The same, {far} letters", "share of letters written"),
        ("longer", "coverage_loss", f"Coverage loss, {far} letters", "Σ min(α, cov)"),
    )
    for ax, (strings, name, title, ylabel) in zip(axes, panels, strict=True):
        for index, (arm, looks) in enumerate(numbers["arms"].items()):
            values = np.array(looks[strings][name])
            plotting.draw_band(ax, numbers["looks"][::2], values[::2], index=index, label=arm)
        ax.set(title=title, ylabel=ylabel, ylim=(0, None))
        if name in ("coverage_loss", "excess"):
            floor = numbers["floor"]["per string"]
            ax.axhline(floor, color="black", linestyle="--", linewidth=1, label="floor")
        if name == "repeated":
            ax.set_ylim(0, 0.12)  # all arms begin at about one half
        ax.grid(alpha=0.3)
    for ax in axes[3:]:
        ax.set_xlabel("step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"Additive attention learns to reverse, with coverage and without"
        f" ({numbers['config']['seeds']} seeds)"
    )
    return figure
