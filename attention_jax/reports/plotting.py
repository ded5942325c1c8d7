"""Matplotlib figures of arrays."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogFormatterMathtext
from PIL import Image  # matplotlib needs it, too

from attention_jax.runs.progress import printable
from attention_jax.runs.run_folder import writing
from attention_jax.scores.registry import FOUR_SCORES

# Okabe and Ito's colours, distinct for every kind of colour vision. The first four belong to
# FOUR_SCORES; see `index_of`.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# One marker for each colour.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# Decorates functions that draw: Matplotlib's defaults, whatever a matplotlibrc or rcParams say.
# Two differ: publishers refuse the fonts of type 3, and the same figure is the same SVG.
_SETTINGS: dict[Any, Any] = {**matplotlib.rcParamsDefault, "pdf.fonttype": 42}
_SETTINGS["svg.hashsalt"] = "attention_jax"
del _SETTINGS["backend"]
own_settings = matplotlib.rc_context(_SETTINGS)


def style_of(index: int) -> dict[str, Any]:
    """The colour and the marker of a line; with more lines than colours, other markers."""
    shifted = index + index // len(COLORS)
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[shifted % len(MARKERS)]}


def index_of(label: str, labels: Iterable[str] = ()) -> int:
    """The index of a line's colour and marker: FOUR_SCORES have theirs in all figures.

    Args:
        label: of the line, a score or anything else.
        labels: of the figure's lines, in their order; those of no such score come after the four.
    """
    return [*dict.fromkeys([*FOUR_SCORES, *labels, label])].index(label)


@own_settings
def new_figure(
    width: float,
    height: float,
    *,
    rows: int = 1,
    columns: int = 1,
    grid: bool = False,
    **subplots: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row, independent of any global state; sizes in inches.

    All text is literal: Matplotlib does not read formulas between two `$`. A function that draws in
    these axes is independent of a matplotlibrc, too, if `own_settings` decorates it.
    """
    figure = _LiteralFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for ax in axes if grid else ():
        ax.grid(alpha=0.3)
    return figure, axes


class _LiteralFigure(Figure):
    """A figure in which `$` is a letter, so that it can draw what users wrote."""

    @own_settings
    def draw(self, renderer: Any) -> None:
        for axis in self.findobj(Axis):
            for ticks, replace in (
                (axis.major, axis.set_major_formatter),
                (axis.minor, axis.set_minor_formatter),
            ):
                if isinstance(ticks.formatter, LogFormatterMathtext):
                    replace(_PlainNumbers(axis.get_transform().base))  # type: ignore[attr-defined]
        for text in self.findobj(Text):
            text.set_parse_math(False)
            text.set_usetex(False)
            text.set_text(printable(text.get_text()))
        super().draw(renderer)


class _PlainNumbers(LogFormatter):
    """Labels of a logarithmic axis that are no formulas: 0.001 instead of 10 to the power of -3."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def check_figure(path: Path) -> None:
    """Raises ValueError unless `path` can be a figure by its name: .png, .pdf or .svg."""
    if path.suffix not in (".png", ".pdf", ".svg") or path.is_dir():
        raise ValueError(f"figure must be a file that ends in .png, .pdf or .svg; got {path}")


@own_settings
def save(figure: Figure, path: Path | str) -> Path:
    """Writes a PNG, PDF or SVG by the suffix of `path`, making its folder; returns the path.

    The same figure gives the same bytes: the files hold no date.

    Raises:
        ValueError: the suffix is another, or the file cannot be written.
    """
    path = Path(path)
    check_figure(path)
    if path.suffix == ".png":
        content = png(figure)
    else:
        drawn, date = io.BytesIO(), "CreationDate" if path.suffix == ".pdf" else "Date"
        figure.savefig(drawn, format=path.suffix[1:], metadata={date: None})
        content = drawn.getvalue()
    with writing("figure", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path


@own_settings
def png(figure: Figure) -> bytes:
    """The figure as a PNG of 256 colours, which takes a third of the bytes of full colour.

    The palette has a colour near that of every pixel, those of thin lines included.
    """
    drawn, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    image = Image.open(drawn).convert("RGB")
    palette = Image.Quantize.MAXCOVERAGE
    image = image.quantize(256, palette, kmeans=1, dither=Image.Dither.NONE)
    image.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


@own_settings
def draw_weights(
    axes: Axes, weights: np.ndarray, query_labels: Sequence[str], key_labels: Sequence[str]
):
    """Attention weights [T, S] as a heat map from 0 to 1, one row per query; returns the image.

    A NaN is an empty cell.

    Args:
        axes: where to draw.
        weights: float [T, S].
        query_labels: T labels of rows.
        key_labels: S labels of columns.
    """
    image = axes.imshow(np.asarray(weights), cmap="viridis", vmin=0, vmax=1)
    _label_pairs(axes, query_labels, key_labels)
    return image


@own_settings
def draw_gradients(
    axes: Axes, gradients: np.ndarray, query_labels: Sequence[str], key_labels: Sequence[str]
):
    """Gradients [T, S] as a heat map, white for 0; arguments as in `draw_weights`."""
    finite = np.ma.masked_invalid(gradients)
    largest = float(np.ma.filled(np.max(np.abs(finite)), 0)) or 1.0
    image = axes.imshow(finite, cmap="RdBu_r", vmin=-largest, vmax=largest)
    _label_pairs(axes, query_labels, key_labels)
    return image


def _label_pairs(axes: Axes, query_labels: Sequence[str], key_labels: Sequence[str]) -> None:
    # sentencepiece's mark of the beginning of a word would overlap the next label.
    rows, columns = (
        [printable(label.replace("▁", "_"), keep="") for label in side]
        for side in (query_labels, key_labels)
    )
    words = max(map(len, columns), default=0) > 3
    axes.set_xticks(range(len(columns)), columns, rotation=90 if words else 0)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.set_xlabel("key")


@own_settings
def weight_heatmaps(
    panels: Mapping[str, tuple[np.ndarray, Sequence[str], Sequence[str]]],
    *,
    columns: int | None = None,
    ylabel: str = "query",
    xlabel: str = "key",
    size: float = 3.1,
) -> Figure:
    """Heat maps side by side.

    Args:
        panels: by title, (weights [T, S], labels of rows, labels of columns).
        columns: panels per row; None for all.
        ylabel: label of the queries.
        xlabel: label of the keys.
        size: of a panel, in inches.
    """
    columns = min(columns or len(panels), len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(size * columns + 0.6, (size + 0.4) * rows, rows=rows, columns=columns)
    for unused in axes[len(panels) :]:
        unused.remove()
    for ax, (title, (weights, query_labels, key_labels)) in zip(axes, panels.items(), strict=False):
        image = draw_weights(ax, weights, query_labels, key_labels)
        ax.set_xlabel(xlabel)
        ax.set_title(title)
    for ax in axes[: len(panels) : columns]:
        ax.set_ylabel(ylabel)
    figure.colorbar(image, ax=axes[: len(panels)], label="attention weight", shrink=0.8)
    return figure


def over_seeds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample deviation over the last axis of the numbers that are finite; else NaN."""
    finite = np.ma.masked_invalid(values)
    mean, deviation = np.ma.mean(finite, axis=-1), np.ma.std(finite, axis=-1, ddof=1)
    return np.ma.filled(mean, np.nan), np.ma.filled(deviation, np.nan)


@own_settings
def draw_band(
    axes: Axes,
    x: Sequence[float],
    values: np.ndarray,
    *,
    index: int,
    label: str,
    log: bool = False,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> None:
    """The mean over seeds of `values` [len(x), seeds], in a band of ± one deviation of several.

    A seed that is not finite at an x does not count there; with `log`, nor does one that is 0.

    Args:
        axes: where to draw.
        x: the position of each row of `values`.
        values: float [len(x), seeds].
        index: of the colour and the marker.
        label: the line's label.
        log: use mean and deviation of the logarithms, for a logarithmic axis: a band of plain
            deviations could reach below zero.
        limits: the smallest and the largest possible value, at which the band is cut off.
    """
    mean, deviation = over_seeds(np.ma.log(values) if log else values)
    middle, low, high = (
        np.exp(curve) if log else curve for curve in (mean, mean - deviation, mean + deviation)
    )
    style = style_of(index)
    if len(x) > 20:
        style["marker"] = None
    axes.plot(x, middle, label=label, markersize=5, **style)
    if np.shape(values)[-1] > 1:
        low, high = np.clip(low, *limits), np.clip(high, *limits)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
