"""Figures of complexity_ledger.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the memory by score, and the operations for one query."""
    return {
        "complexity_ledger": _memory_figure(numbers),
        "complexity_ledger_flops": _flops_figure(numbers),
    }


def _memory_figure(numbers: JSON) -> Figure:
    lengths, scores = numbers["config"]["lengths"], numbers["scores"]
    forms = list(scores["additive"]["memory"])
    figure, (*curves, bars) = plotting.new_figure(11.5, 4.7, columns=3, sharey=True)
    for ax, name in zip(curves, ("additive", "scaled"), strict=True):
        for index, form in enumerate(forms):
            measured = scores[name]["memory"][form]["backward"]
            ax.loglog(
                lengths,
                np.array(measured["bytes"]) / 2**20,
                color=plotting.COLORS[index],
                marker=plotting.MARKERS[index],
                markersize=5,
                label=f"{form}: grows as T^{measured['exponent_of_increments']:.2f}",
            )
        ax.set_title(f"{name}, {scores[name]['parameters']:,} parameters")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        ax.legend(fontsize=9, loc="upper left")
        ax.set_xlabel("length, T = S")
    width = 0.27
    positions = np.arange(len(scores))
    for index, form in enumerate(forms):
        longest = [score["memory"][form]["backward"]["bytes"][-1] for score in scores.values()]
        bars.bar(
            positions + (index - 1) * width, np.array(longest) / 2**20, width,
            color=plotting.COLORS[index], label=form,
        )  # fmt: skip
    bars.set_xticks(positions, list(scores), rotation=40, ha="right")
    bars.set_title(f"all scores, T = {lengths[-1]}")
    bars.legend(fontsize=9, loc="upper right")
    low, high = bars.get_ylim()
    bars.set_ylim(low, high * 30)  # room for legends
    for ax in (*curves, bars):
        ax.grid(alpha=0.3)
        ax.set_axisbelow(True)
    curves[0].set_ylabel("temporary memory (MiB)")
    figure.suptitle(
        "Memory of attention with all its gradients, one head, d = "
        f"{numbers['config']['dim']}: materialised, or in tiles"
    )
    return figure


def _flops_figure(numbers: JSON) -> Figure:
    lengths = numbers["config"]["lengths"]
    figure, (axes,) = plotting.new_figure(7.5, 4.6)
    lines = {
        "additive, [q; k] multiplied anew for each pair (chapter)": (
            numbers["concatenated_flops_per_query"], "--",
        ),
        **{
            f"{name}, ours" if name == "additive" else name: (
                numbers["scores"][name]["flops_per_query"], "-",
            )
            for name in ("additive", "general", "dot", "scaled")
        },
    }  # fmt: skip
    for index, (label, (flops, style)) in enumerate(lines.items()):
        axes.loglog(
            lengths,
            flops,
            style,
            color=plotting.COLORS[index],
            marker=plotting.MARKERS[index],
            markersize=6 - index * 0.6,
            label=label,
        )
    tanhs = numbers["scores"]["additive"]["pair"][1]
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 5)
    axes.set(
        xlabel="keys S that the query looks at (T = S queries share their projections)",
        ylabel="additions and multiplications",
        title=f"Operations for the logits of one query, d = {numbers['config']['dim']}\n"
        f"(additive: {tanhs:.0f} tanh for each pair besides)",
    )
    return figure
