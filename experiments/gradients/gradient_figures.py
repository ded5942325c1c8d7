"""Figures of gradient_analysis.py, one per question, drawn from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.gradients import gradient_questions as questions
from experiments.reversal.arms import loss_of_guessing
from experiments.score_colors import score_indices

CAPTIONS = {
    "gradient_analysis_dimension": (
        "Six panels over the dimension d. Random queries and keys: unscaled dot's entropy falls to"
        " near 0 and scaled dot's stays; unscaled dot's mean Jacobian norm falls as 1/sqrt(d), its"
        " median exponentially; the mean gradient into the query stays above scaled dot's while the"
        " median vanishes. Reversal model: at initialisation unscaled dot's Jacobian norm falls"
        " with d; trained at the largest d its loss stays near that of guessing letters and its"
        " entropy near 0, where scaled dot learns. Bands: 1.96 standard errors over queries, one"
        " deviation over seeds."
    ),
    "gradient_analysis_tanh": (
        "Four panels over the factor on the kernels. The share of saturated tanh units rises along"
        " its formula to over nine tenths; additive's logits stop growing, scaled dot's do not;"
        " additive's entropy stays high, scaled dot's falls to 0; the gradient into additive's"
        " kernels rises and falls while that into v grows; scaled dot's stays large in the mean and"
        " falls in the median."
    ),
    "gradient_analysis_padding": (
        "Four panels. Shares of keys, weights and gradient at padding keys, at initialisation and"
        " after training: none with a mask, some without. Signal to noise of the gradients."
        " Loss on the shortest strings with and without the padding of"
        " training: equal with a mask, very different without. Points: seeds."
    ),
    "gradient_analysis_curvature": (
        "Four panels by score, at initialisation and after training, one point per seed: largest"
        " and smallest eigenvalue of the loss's Hessian, its trace per parameter, the largest"
        " eigenvalue over the root mean square of all, and the loss."
    ),
}

_NAMES = {"scaled": "scaled dot"}
_INDICES = score_indices(("additive", "dot", "scaled"))
_ATTENTIONS = {"cross": questions.CROSS, "encoder": questions.SELF}
# What is no score has colours that no score of these figures has.
_QUANTITIES = {"keys": ("keys", "0.8"), "weights": ("weights", plotting.COLORS[5]),
               "gradient": ("|dlogits|", plotting.COLORS[4])}  # fmt: skip
_LARGEST_NORM = 0.5  # that a softmax's Jacobian can have
_GREYS = ("0.35", "0.6", "0.85")


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    config = numbers["config"]
    figures = (
        _dimension(config, numbers["random"], numbers["models"], numbers["training"]),
        _tanh(config, numbers["kernels"]),
        _padding(config, numbers["padding"]),
        _curvature(config, numbers["curvature"]),
    )
    return dict(zip(CAPTIONS, figures, strict=True))


def _dimension(config: JSON, random: JSON, models: JSON, training: JSON) -> Figure:
    figure, axes = plotting.new_figure(7.6, 8.8, rows=3, columns=2)
    dims, largest = config["dims"], math.log(config["source_length"])
    entropy, jacobian, query, initial, loss, while_learning = axes
    for score in questions.PRODUCTS:
        of_score, name, index = random["scores"][score], _name(score), _INDICES[score]
        _mean(entropy, dims, of_score["entropy"], index, f"{name}, mean", most=largest)
        for ax, number in ((jacobian, "jacobian_norm"), (query, "dquery_rms")):
            _mean(ax, dims, of_score[number], index, f"{name}, mean")
            _median(ax, dims, of_score[number], index, f"{name}, median")
        norms = np.array([model[score]["jacobian_norm"] for model in models.values()])
        _seeds(initial, [int(dim) for dim in models], norms, index, name, most=_LARGEST_NORM)
        for ax, number in ((loss, "loss"), (while_learning, "entropy")):
            _seeds(ax, training["steps"], np.array(training[score][number]), index, name)
    limit, density = random["limit_of_entropy"], random["gap_density"]
    _theory(entropy, dims, [limit] * len(dims), "standard normal logits")
    _theory(jacobian, dims, [density / math.sqrt(dim) for dim in dims], "f(0) / √d")
    loss.axhline(
        loss_of_guessing(), color="black", linestyle="--", label="length known, letters guessed"
    )
    keys = config["source_length"]
    _label(entropy, f"Random queries, {keys} keys: entropy", "dimension d", "nats", log="x")
    _label(jacobian, "Random: softmax Jacobian", "dimension d", "norm", log="xy")
    _label(query, "Random: gradient into the query", "dimension d", "rms of a component", log="xy")
    _label(initial, "Untrained model: softmax Jacobian", "dimension of the model", "norm", log="x")
    dim = config["trained_dim"]
    _label(loss, f"Learning to reverse, dimension {dim}", "step", "loss (nats per token)")
    _label(while_learning, "Its cross attention's entropy", "step", "nats")
    for ax, ticks in (
        (entropy, dims), (jacobian, dims), (query, dims), (initial, config["model_dims"]),
    ):  # fmt: skip
        ax.set_xticks(ticks, ticks)
        ax.minorticks_off()
    initial.set_ylim(0, _LARGEST_NORM)
    while_learning.set_ylim(bottom=0)
    jacobian.set_ylim(bottom=1e-5)
    figure.supxlabel(
        "Bands: 1.96 standard errors over queries (random), one deviation over seeds (models)",
        fontsize=9,
    )
    return figure


def _tanh(config: JSON, kernels: JSON) -> Figure:
    figure, (units, logits, entropy, gradient) = plotting.new_figure(8.8, 6.8, rows=2, columns=2)
    scales, length = config["kernel_scales"], config["source_length"]
    additive, product = (_INDICES[score] for score in ("additive", "scaled"))
    of_additive, dot = kernels["additive"], kernels["scaled"]["query_kernel"]
    _mean(units, scales, of_additive["saturated_units"], additive, "additive, measured", most=1)
    bound = math.atanh(questions.TANH_BOUND)
    formula = [math.erfc(bound / scale / math.sqrt(2)) for scale in scales]
    _theory(units, scales, formula, "of normal arguments")
    for score, of_score in kernels.items():
        name, index = _name(score), _INDICES[score]
        deviations = np.sqrt(of_score["logit_variance"]["mean"])
        logits.plot(scales, deviations, color=plotting.COLORS[index],
                    marker=plotting.MARKERS[index], markersize=5, label=name)  # fmt: skip
        _mean(entropy, scales, of_score["entropy"], index, name, most=math.log(length))
    _theory(entropy, scales, [math.log(length)] * len(scales), f"uniform, log {length}")
    _mean(gradient, scales, of_additive["query_kernel"], additive, "additive: query kernel")
    _mean(gradient, scales, of_additive["v"], additive, "additive: v", style="--", marker="x")
    _mean(gradient, scales, dot, product, "scaled dot: query kernel, mean")
    _median(gradient, scales, dot, product, "the same, median")
    means = [*of_additive["query_kernel"]["mean"], *of_additive["v"]["mean"], *dot["mean"]]
    gradient.set_ylim(min(means) / 5, max(means) * 5)  # the median falls far below
    x = "factor on the initial kernels"
    title = f"Tanh units with |tanh| > {questions.TANH_BOUND}"
    _label(units, title, x, "share", log="x")
    _label(logits, "Logits within a row", x, "standard deviation", log="xy")
    _label(entropy, "Entropy of the weights", x, "nats", log="x")
    _label(gradient, "Gradient into the parameters", x, "norm", log="xy")
    figure.supxlabel("Bands: 1.96 standard errors of the mean over random kernels", fontsize=9)
    return figure


def _padding(config: JSON, padding: JSON) -> Figure:
    figure, axes = plotting.new_figure(9.6, 7.8, rows=2, columns=2)
    arms = {name: arm for name, arm in padding.items() if name.startswith("unmasked")}
    labels = [f"{where}\npadded to {name.split(', ')[1]}" for name in arms for where in _ATTENTIONS]
    for look, when in enumerate(("at initialisation", f"after {config['padding_steps']} steps")):
        groups = {
            label: [arm[where][what][look] for arm in arms.values() for where in _where()]
            for what, (label, _) in _QUANTITIES.items()
        }
        _bars(axes[look], labels, groups, [color for _, color in _QUANTITIES.values()])
        _label(axes[look], f"No mask: share at padding {when}", "", "share")
        axes[look].set_ylim(0, 1.03)
    ratios = {
        _arm_name(name): [arm["signal_to_noise"][group][0] for group in questions.GROUPS]
        for name, arm in padding.items()
    }
    groups_of_parameters = [group.replace(" ", "\n") for group in questions.GROUPS]
    _bars(axes[2], groups_of_parameters, ratios, _GREYS)
    _label(axes[2], "Gradient at initialisation", "", "signal to noise of a batch")
    losses = {
        label: [arm[what][-1] for arm in padding.values()]
        for label, what in (("padded as in training", "padded"), ("without padding", "bare"))
    }
    names = [_arm_name(name).replace(", ", ",\n") for name in padding]
    _bars(axes[3], names, losses, ("0.35", "white"))
    _label(axes[3], "Shortest strings, after training", "", "loss (nats per token)", log="y")
    figure.supxlabel("Bars: means over seeds. Points: seeds.", fontsize=9)
    return figure


def _where() -> list[str]:
    return list(_ATTENTIONS.values())


def _arm_name(name: str) -> str:
    mask, width = name.split(", ")
    return f"{'mask' if mask == 'masked' else 'no mask'}, padded to {width}"


def _curvature(config: JSON, curvature: JSON) -> Figure:
    figure, (edges, trace, ratio, loss) = plotting.new_figure(9.6, 7.2, rows=2, columns=2)
    for position, (score, index) in enumerate(score_indices(curvature).items()):
        arm = {name: np.array(looks) for name, looks in curvature[score].items()}
        for look in (0, 1):
            place = position, look, index
            _points(edges, arm["largest"][look], *place, marker="^")
            _points(edges, arm["smallest"][look], *place, marker="v")
            _points(trace, arm["trace"][look] / arm["parameters"][look], *place)
            _points(ratio, arm["largest"][look] / arm["rms"][look], *place)
            _points(loss, arm["loss"][look], *place)
    edges.set_yscale("symlog", linthresh=10)
    positive = min(np.min(arm["trace"]) for arm in curvature.values()) > 0
    trace.set_yscale("log" if positive else "linear")
    loss.set_yscale("log")
    steps = config["curvature_steps"]
    for ax, title, label in (
        (edges, "Edges of the Hessian's spectrum (▲ largest, ▼ smallest)", "eigenvalue"),
        (trace, "Mean eigenvalue: trace per parameter", "eigenvalue"),
        (ratio, "Largest eigenvalue over the rms of all", "ratio"),
        (loss, "Loss where the Hessian was taken", "nats per token"),
    ):
        ax.set(title=title, ylabel=label)
        ax.set_xticks(range(len(curvature)), [_name(score) for score in curvature])
        ax.set_xlim(-0.5, len(curvature) - 0.5)
        ax.grid(alpha=0.3)
    figure.supxlabel(
        f"Open markers: at initialisation. Filled markers: after {steps} steps. One marker per"
        " seed, a line at their mean.",
        fontsize=9,
    )
    return figure


def _points(
    ax: Axes, seeds: np.ndarray, position: int, look: int, index: int, *, marker: str = "o"
) -> None:
    """Draws one marker per seed, open before training and filled after it."""
    color = plotting.COLORS[index % len(plotting.COLORS)]
    x = position + 0.3 * look - 0.15
    ax.plot(
        x + np.linspace(-0.05, 0.05, len(seeds)),
        seeds,
        marker,
        color=color,
        markerfacecolor=color if look else "white",
        markersize=6,
    )
    ax.hlines(seeds.mean(), x - 0.12, x + 0.12, color=color, linewidth=1.5)


def _mean(
    ax: Axes,
    x: Sequence[float],
    numbers: JSON,
    index: int,
    label: str,
    *,
    most: float = math.inf,
    style: str = "-",
    marker: str | None = None,
) -> None:
    """Draws a line with a band of ± 1.96 standard errors, between 0 and `most`."""
    mean, half = np.array(numbers["mean"]), 1.96 * np.array(numbers["error"])
    color, marker = plotting.COLORS[index], marker or plotting.MARKERS[index]
    ax.plot(x, mean, style, color=color, marker=marker, markersize=5, label=label)
    low, high = np.maximum(mean - half, 0), np.minimum(mean + half, most)
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _median(ax: Axes, x: Sequence[float], numbers: JSON, index: int, label: str) -> None:
    # Above the means, which are as large where the line is flat.
    ax.plot(
        x, numbers["median"], ":", color=plotting.COLORS[index], marker="+", zorder=3, label=label
    )


def _seeds(
    ax: Axes,
    x: Sequence[float],
    values: np.ndarray,
    index: int,
    label: str,
    *,
    most: float = math.inf,
) -> None:
    """Draws the mean over seeds in a band of ± one deviation, between 0 and `most`."""
    mean, deviation = values.mean(-1), values.std(-1, ddof=1)
    color, marker = plotting.COLORS[index], plotting.MARKERS[index]
    ax.plot(x, mean, color=color, marker=marker, markersize=5, label=label)
    low, high = np.maximum(mean - deviation, 0), np.minimum(mean + deviation, most)
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _name(score: str) -> str:
    return _NAMES.get(score, score)


def _theory(ax: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    ax.plot(x, y, color="black", linestyle="--", linewidth=1.2, label=label)


def _bars(
    ax: Axes, labels: Sequence[str], groups: dict[str, list[list[float]]], colors: Sequence[str]
) -> None:
    """Draws the means over seeds of each group [labels, seeds], and the seeds as points."""
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups.items()):
        color = colors[index % len(colors)]
        for position, seeds in enumerate(values):
            x = position + (index - (len(groups) - 1) / 2) * width
            label = name if position == 0 else None
            ax.bar(x, np.mean(seeds), width, color=color, edgecolor="black", linewidth=0.6,
                   label=label)  # fmt: skip
            spread = x + np.linspace(-0.2, 0.2, len(seeds)) * width
            ax.plot(spread, seeds, "o", color="black", markersize=3)
    ax.set_xticks(range(len(labels)), labels)
    ax.set_axisbelow(True)


def _label(ax: Axes, title: str, x: str, y: str, *, log: str = "") -> None:
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9)
