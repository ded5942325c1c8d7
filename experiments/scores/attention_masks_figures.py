"""Figures of attention_masks.py, drawn from its numbers alone."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON

STATUSES = ("empty", "full", "partial")

CAPTIONS = {
    "attention_masks": (
        "Nine masks over 24 queries and 24 keys as tables, allowed pairs dark, cut into tiles of "
        "four by four: causal, a window to the left, padding, three segments, and combinations."
    ),
    "attention_masks_tiles": (
        "Share of the tiles that are empty, full and partly masked, for nine masks of many"
        " positions; their number stands on each bar."
    ),
    "attention_masks_misread": (
        "Attention weights of six tokens. Upper row: a causal mask and a padding mask, read the "
        "right way and the wrong way round, where queries look only at the future or only at "
        "padding. Lower row: a query without keys, masked in five ways; NaN is drawn in pink."
    ),
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the tables, the shares of tiles, and masks read the wrong way round."""
    return {
        "attention_masks": _table_figure(numbers),
        "attention_masks_tiles": _tile_figure(numbers),
        "attention_masks_misread": _misread_figure(numbers),
    }


def _table_figure(numbers: JSON) -> Figure:
    tables, tile = numbers["tables"], numbers["config"]["drawn_tile"]
    figure, axes = plotting.new_figure(
        9.6, 10.4, rows=-(-len(tables) // 3), columns=3, sharex=True, sharey=True
    )
    colors = ListedColormap(["white", plotting.COLORS[5]])
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        length = len(table)
        ax.imshow(table, cmap=colors, vmin=0, vmax=1)
        edges = np.arange(0, length + 1, tile) - 0.5
        ax.vlines(edges, -0.5, length - 0.5, color="gray", lw=0.6)
        ax.hlines(edges, -0.5, length - 0.5, color="gray", lw=0.6)
        allowed = np.mean(table)
        ax.set_title(f"{name}\n{100 * allowed:.0f} % of the pairs", fontsize=11)
        ax.set(xlabel="key position", ylabel="query position")
        ax.label_outer()
    figure.suptitle(f"Who may attend to whom (blue), in tiles of {tile} × {tile}")
    return figure


def _tile_figure(numbers: JSON) -> Figure:
    tiles, config = numbers["tiles"], numbers["config"]
    figure, (axes,) = plotting.new_figure(9.5, 4.8)
    names = list(tiles)[::-1]
    total = (config["length"] // config["tile"]) ** 2
    left = np.zeros(len(names))
    styles = {
        "empty": ("#e8e8e8", "black", "empty: skipped"),
        "full": (plotting.COLORS[5], "black", "full: not masked"),
        "partial": (plotting.COLORS[4], "black", "partial: masked pair by pair"),
    }
    for status in STATUSES:
        fill, ink, label = styles[status]
        shares = np.array([100 * tiles[name]["said"][status] / total for name in names])
        axes.barh(names, shares, left=left, color=fill, edgecolor="gray", label=label)
        for row, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share > 4:
                text = f"{tiles[names[row]]['said'][status]}"
                axes.text(start + share / 2, row, text, ha="center", va="center", color=ink)
        left += shares
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the tiles (%); their number is written on the bars")
    axes.set_title(
        f"What tiles of {config['tile']} × {config['tile']} hold, T = S = {config['length']}: "
        f"{total} tiles"
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _misread_figure(numbers: JSON) -> Figure:
    figure, axes = plotting.new_figure(12, 5.4, rows=2, columns=5)
    upper = {}
    for name, of_mask in numbers["misread"].items():
        upper[f"{name} mask"] = of_mask["read"]
        upper[f"{name} mask, misread"] = of_mask["misread"]
    lower = {
        f"{name}\ngradients: logits {_described(way['logits'])},"
        f"\nvalues {_described(way['values'])}": way["table"]
        for name, way in numbers["no_keys"].items()
    }
    axes.pop(len(upper)).remove()
    for ax, (title, table) in zip(axes, (upper | lower).items(), strict=True):
        weights = _array(table)
        labels = [[str(n + 1) for n in range(size)] for size in weights.shape]
        image = plotting.draw_weights(ax, weights, *labels)
        image.set_cmap(_WITH_NAN)
        for row, column in np.argwhere(np.isnan(weights)):
            ax.text(column, row, "NaN", ha="center", va="center", fontsize=9)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    figure.suptitle("Above: masks read the other way round. Below: query 2 has no key left")
    return figure


_WITH_NAN = colormaps["viridis"].with_extremes(bad="#ff9bd2")


def _described(gradient: dict[str, float]) -> str:
    if gradient["nan"]:
        return "NaN"
    return "not 0" if gradient["largest"] else "0"


def _array(table: list[list[float | None]]) -> np.ndarray:
    return np.array([[np.nan if number is None else number for number in row] for row in table])
