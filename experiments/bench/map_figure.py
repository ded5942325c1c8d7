"""The figure of `maps`: shares of seeds and steps until solved, one panel per score."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from attention_jax.reports import plotting
from experiments.bench.map_rows import best_cell, infinite
from experiments.lab import Row

_STAR = plotting.COLORS[4]  # of no score
_BEST = plotting.COLORS[1]


def draw(
    panels: Mapping[str, list[Row]], stars: Mapping[str, Sequence[float]], columns: int
) -> Any:
    """Panels of deviation (across) and rate (up).

    Args:
        panels: the rows of each title.
        stars: the deviations of constants of papers, by title.
        columns: panels side by side.
    """
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    size = (3.6, 1.5) if columns == 2 else (2.9, 1.25)
    figure, axes = plotting.new_figure(
        size[0] * columns + 0.5, 0.5 + size[1] * lines, rows=lines, columns=columns
    )
    rates = sorted({row["rate"] for rows in panels.values() for row in rows})
    image: Any = None
    for ax, (title, rows) in zip(axes, panels.items(), strict=False):
        image = _draw_map(ax, {row["rate"]: row for row in rows}, rates, stars.get(title, ()))
        ax.set_title(title, fontsize=10, pad=8)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["none", "half", "all"], fontsize=8)
    bar.set_label("seeds that solve the task", fontsize=9)
    label = "deviation of the logits at the start, within rows"
    figure.supxlabel(f"{label};  ★ the constant of the paper,  □ the best cell", fontsize=9)
    figure.supylabel("learning rate", fontsize=9)
    return figure


def _draw_map(ax: Any, of: dict[float, Row], rates: list[float], stars: Sequence[float]) -> Any:
    deviations = next(iter(of.values()))["deviations"][:-1]
    share = np.full((len(rates), len(deviations)), np.nan)
    for i, rate in enumerate(rates):
        if rate not in of:
            ax.axhspan(i - 0.5, i + 0.5, fc="white", ec="0.75", hatch="////", lw=0)
            continue
        solved = infinite(of[rate]["solved"])[:-1]  # [deviations, seeds]
        share[i] = np.isfinite(solved).mean(-1)
        for j, steps in enumerate(np.median(solved, axis=-1)):
            if np.isfinite(steps):
                color = "white" if share[i, j] > 0.5 else "black"
                ax.text(j, i, f"{steps:.0f}", ha="center", va="center", fontsize=7, color=color)
    image = ax.imshow(share, cmap="Greys", vmin=0, vmax=1, aspect="auto", origin="lower")
    if np.nanmax(share) >= 0.5:
        deviation, rate = best_cell([*of.values()])
        place = deviations.index(deviation) - 0.5, rates.index(rate) - 0.5
        ax.add_patch(Rectangle(place, 1, 1, fill=False, ec=_BEST, lw=1.8, zorder=3))
    first, last = np.log2(deviations[0]), np.log2(deviations[-1])
    per_octave = (len(deviations) - 1) / (last - first) if last > first else 1.0
    for star in stars:
        place_of_star = (np.log2(star) - first) * per_octave
        if -0.5 <= place_of_star <= len(deviations) - 0.5:
            ax.axvline(place_of_star, color=_STAR, lw=1, ls="--")
            look: Any = {"ms": 10, "color": _STAR, "mec": "white", "mew": 0.7}
            ax.plot(place_of_star, len(rates) - 0.5, "*", clip_on=False, zorder=4, **look)
    ax.set_xlim(-0.5, len(deviations) - 0.5)
    ax.set_ylim(-0.5, len(rates) - 0.5)
    ticks = range(0, len(deviations), 2)
    ax.set_xticks(ticks, [_power(deviations[i]) for i in ticks], fontsize=8)
    ax.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates], fontsize=8)
    ax.tick_params(length=0)
    return image


def _power(deviation: float) -> str:
    """1/4 for 0.25."""
    return f"1/{1 / deviation:.3g}" if deviation < 0.6 else f"{deviation:.3g}"
