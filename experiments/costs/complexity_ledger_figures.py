"""Figures of complexity_ledger.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from attention_jax import SCORES
from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.score_colors import score_indices

FORMS = ("naive", "reference", "tiled")
# Colours that no score of these figures has.
_COLORS = dict(zip(FORMS, plotting.COLORS[4:], strict=True))
CHAPTER = ("additive", "dot", "general", "scaled")


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the memory by score, and the operations for one query."""
    return {
        "complexity_ledger": _memory_figure(numbers),
        "complexity_ledger_flops": _flops_figure(numbers),
    }


def _memory_figure(numbers: JSON) -> Figure:
    lengths, scores = numbers["config"]["lengths"], numbers["scores"]
    figure, (*curves, bars) = plotting.new_figure(11.5, 4.7, columns=3, sharey=True)
    drawn = [name for name in ("additive", "scaled") if name in scores]
    drawn = [*drawn, *(name for name in scores if name not in drawn)][:2]
    for ax, name in zip(curves, drawn, strict=False):
        for form, measured in scores[name]["memory"].items():
            ax.loglog(
                lengths,
                np.array(measured["backward"]["bytes"]) / 2**20,
                color=_COLORS[form],
                marker=plotting.MARKERS[FORMS.index(form)],
                markersize=5,
                label=f"{form}: grows as T^{measured['backward']['exponent_of_increments']:.2f}",
            )
        ax.set_title(f"{name}, {scores[name]['parameters']:,} parameters")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        ax.legend(fontsize=9, loc="upper left")
        ax.set_xlabel("length, T = S")
    for unused in curves[len(drawn) :]:
        unused.set_axis_off()
    width = 0.27
    for index, form in enumerate(FORMS):
        held = {
            position: of_score["memory"][form]["backward"]["bytes"][-1] / 2**20
            for position, of_score in enumerate(scores.values())
            if form in of_score["memory"]
        }
        positions = np.array(list(held)) + (index - 1) * width
        bars.bar(positions, list(held.values()), width, color=_COLORS[form], label=form)
    bars.set_yscale("log")
    bars.set_xticks(range(len(scores)), list(scores), rotation=40, ha="right")
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
    """The chapter's four scores, and those that have no name in `SCORES`."""
    lengths, scores = numbers["config"]["lengths"], numbers["scores"]
    figure, (axes,) = plotting.new_figure(7.5, 4.6)
    title = f"Operations for the logits of one query, d = {numbers['config']['dim']}"
    if "additive" in scores:
        axes.loglog(
            lengths,
            numbers["concatenated_flops_per_query"],
            "--o",
            color=plotting.COLORS[0],
            markerfacecolor="white",
            label="additive as in the chapter: W [q; k] for each pair",
        )
        tanhs = scores["additive"]["pair"][1]
        title += f"\n(additive: {tanhs:.0f} tanh for each pair besides)"
    drawn = [name for name in scores if name in CHAPTER or name not in SCORES]
    for size, (name, index) in enumerate(score_indices(drawn).items()):
        label = "additive, each token projected once" if name == "additive" else name
        # Lines that nearly coincide: smaller markers lie on larger ones.
        axes.loglog(
            lengths,
            scores[name]["flops_per_query"],
            color=plotting.COLORS[index % len(plotting.COLORS)],
            marker=plotting.MARKERS[index % len(plotting.MARKERS)],
            markersize=max(9 - 1.5 * size, 3),
            linewidth=max(3 - 0.7 * size, 1),
            label=label,
        )
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 5)
    axes.set(
        xlabel="keys S that the query looks at (T = S queries share their projections)",
        ylabel="additions and multiplications",
        title=title,
    )
    return figure
