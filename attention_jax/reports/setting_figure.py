"""Results of many runs by their settings: a group per setting, a colour per score."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention_jax.reports.plotting import index_of, new_figure, own_settings, style_of
from attention_jax.training.task import Result

_GROUP = 0.84  # height of a group; the distance between two groups is 1
_Results = Mapping[tuple[str, str], Result]  # by score and setting


@own_settings
def results_by_setting(metrics: Mapping[str, _Results]) -> Figure:
    """One panel per metric; in it a point per seed and a line at their mean.

    Settings follow one below the other in the order of the panels, and within a setting the scores.
    A seed that diverged (NaN) has no point.

    Args:
        metrics: by their names, the results of each (score, setting); some may be missing.
    """
    pairs = [pair for results in metrics.values() for pair in results]
    scores, settings = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    lines = max(setting.count("\n") + 1 for setting in settings)
    group = max(0.14 * (len(scores) + 1), 0.2 * lines + 0.1)  # inches
    longest = max(len(line) for setting in settings for line in setting.split("\n"))
    figure, axes = new_figure(
        0.08 * longest + 3.6 * len(metrics),
        group * len(settings) + 1.3 + 0.2 * (len(scores) // 4),
        columns=len(metrics),
        sharey=True,
    )
    room, looks = _GROUP / len(scores), [style_of(index_of(score, scores)) for score in scores]
    for ax, (metric, results) in zip(axes, metrics.items(), strict=True):
        for (score, setting), result in results.items():
            index = scores.index(score)
            place = settings.index(setting) - _GROUP / 2 + room * (index + 0.5)
            _draw_seeds(ax, place, np.asarray(result.by_seed, float), looks[index], room)
        for boundary in range(1, len(settings)):
            ax.axhline(boundary - 0.5, color="0.85", linewidth=0.8)
        _set_range(ax, [*results.values()])
        ax.set_xlabel(metric)
        ax.grid(axis="x", alpha=0.3)
        ax.tick_params(axis="y", length=0)
    axes[0].set(ylim=(len(settings) - 0.5, -0.5))
    axes[0].set_yticks(range(len(settings)), settings)
    handles = [Line2D([], [], linestyle="", markersize=4, **look) for look in looks]
    figure.legend(handles, scores, loc="outside upper center", ncols=min(4, len(scores)))
    return figure


def _draw_seeds(axes: Axes, place: float, by_seed: np.ndarray, look: Any, room: float) -> None:
    """The points of one score, spread around its place, and a line at their mean."""
    spread = room * ((np.arange(len(by_seed)) + 0.5) / len(by_seed) - 0.5) / 2
    axes.plot(by_seed, place + spread, linestyle="", alpha=0.7, markersize=4, **look)
    mean, ends = np.full(2, np.mean(by_seed)), np.array([-0.4, 0.4])
    axes.plot(mean, place + ends * room, color=look["color"])


def _set_range(axes: Axes, results: Sequence[Result]) -> None:
    """The whole range of a bounded metric; a logarithmic axis for numbers of many magnitudes."""
    values = np.concatenate([np.asarray(result.by_seed, float) for result in results])
    values = values[np.isfinite(values)]
    low, high = results[0].low, results[0].high
    if high is not None:
        margin = 0.04 * (high - low)
        axes.set_xlim(low - margin, high + margin)
    elif len(values) and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_xscale("log")
