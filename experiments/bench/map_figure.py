"""The figure of `maps`: shares of seeds and steps until solved, one panel per score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attention_jax.reports import plotting
from experiments.bench.map_rows import infinite
from experiments.lab import Row

_COLUMNS = 4
_STAR = plotting.COLORS[4]  # of no score


def draw(panels: Mapping[str, list[Row]]) -> Any:
    """Panels of deviation (across) and rate (up); `panels` has the rows of each title."""
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plotting.new_figure(
        3.0 * columns, 0.4 + 1.25 * lines, rows=lines, columns=columns
    )
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, (title, rows) in zip(axes, panels.items(), strict=False):
        _draw_map(ax, sorted(rows, key=lambda row: row["rate"]))
        ax.set_title(title, fontsize=9, pad=5)
    label = "deviation of the logits at the start, within rows"
    figure.supxlabel(f"{label};  ★ the constant of the paper", fontsize=9)
    figure.supylabel("learning rate", fontsize=9)
    return figure


def _draw_map(ax: Any, rows: list[Row]) -> None:
    deviations = rows[0]["deviations"][:-1]
    solved = np.array([infinite(row["solved"])[:-1] for row in rows])  # [rates, deviations, seeds]
    share = np.isfinite(solved).mean(-1)
    ax.imshow(share, cmap="Greys", vmin=0, vmax=1.15, aspect="auto", origin="lower")
    for (i, j), steps in np.ndenumerate(np.median(solved, axis=-1)):
        if np.isfinite(steps):
            color = "white" if share[i, j] > 0.5 else "black"
            ax.text(j, i, f"{steps:.0f}", ha="center", va="center", fontsize=6, color=color)
    first, last = np.log2(deviations[0]), np.log2(deviations[-1])
    per_octave = (len(deviations) - 1) / (last - first) if last > first else 1.0
    places = (np.log2([row["own"] for row in rows]) - first) * per_octave
    heights = np.arange(float(len(rows)))
    if np.ptp(places) == 0:  # the same constant at all rates
        ax.axvline(places[0], color=_STAR, lw=1, ls="--")
        places, heights = places[:1], heights[-1:] + 0.5
    heights[abs(places - (len(deviations) - 1) / 2) >= len(deviations) / 2] = np.nan  # outside
    ax.plot(places, heights, "*", ms=10, color=_STAR, mec="white", mew=0.7, clip_on=False)
    ax.set_xlim(-0.5, len(deviations) - 0.5)
    ticks = range(0, len(deviations), 2)
    ax.set_xticks(ticks, [_power(deviations[i]) for i in ticks], fontsize=7)
    ax.set_yticks(range(len(rows)), [f"{row['rate']:g}" for row in rows], fontsize=7)
    ax.tick_params(length=0)


def _power(deviation: float) -> str:
    """1/4 for 0.25."""
    return f"1/{1 / deviation:.3g}" if deviation < 0.6 else f"{deviation:.3g}"
