"""Figures of gradient_analysis.py, one per question, drawn from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from experiments.experiment import JSON
from experiments.gradients import gradient_questions as questions
from experiments.reversal.arms import loss_of_guessing

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
        " after training: none with a mask, some without. Signal to noise of the gradients, which"
        " the mask does not raise. Loss on the shortest strings with and without the padding of"
        " training: equal with a mask, very different without. Error bars: one deviation over"
        " seeds."
    ),
    "gradient_analysis_curvature": (
        "Four panels by score, at initialisation and after training, one point per seed: largest"
        " and smallest eigenvalue of the loss's Hessian, its trace per parameter, the largest"
        " eigenvalue over the root mean square of all, and the loss."
    ),
}

_NAMES = {
    "additive": "additive", "dot": "dot", "general": "general", "scaled": "scaled dot",
}  # fmt: skip
_ATTENTIONS = {"cross attention": questions.CROSS, "encoder attention": questions.SELF}


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
    figure, axes = plotting.new_figure(7.6, 8.4, rows=3, columns=2)
    dims = config["dims"]
    entropy, jacobian, query, initial, loss, while_learning = axes
    for index, score in enumerate(questions.PRODUCTS):
        of_score, name = random["scores"][score], f"{_NAMES[score]}, mean"
        _mean(entropy, dims, of_score["entropy"], index, name)
        for ax, number in ((jacobian, "jacobian_norm"), (query, "dquery_rms")):
            _mean(ax, dims, of_score[number], index, name)
            _median(ax, dims, of_score[number], index, f"{_NAMES[score]}, median")
        plotting.draw_band(
            initial,
            [int(dim) for dim in models],
            np.array([model[score]["jacobian_norm"] for model in models.values()]),
            index=index,
            label=_NAMES[score],
        )
        for ax, number in ((loss, "loss"), (while_learning, "entropy")):
            values = np.array(training[score][number])
            plotting.draw_band(ax, training["steps"], values, index=index, label=_NAMES[score])
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
    initial.set_ylim(0, 0.5)  # 1/2 is the largest possible norm
    while_learning.set_ylim(bottom=0)
    jacobian.set_ylim(bottom=1e-5)
    return figure


def _tanh(config: JSON, kernels: JSON) -> Figure:
    figure, (units, logits, entropy, gradient) = plotting.new_figure(8.8, 6.8, rows=2, columns=2)
    scales, additive = config["kernel_scales"], kernels["additive"]
    _mean(units, scales, additive["saturated_units"], 0, "additive, measured")
    bound = math.atanh(questions.TANH_BOUND)
    formula = [math.erfc(bound / scale / math.sqrt(2)) for scale in scales]
    _theory(units, scales, formula, "of normal arguments")
    for index, score in enumerate(kernels):
        of_score, name = kernels[score], _NAMES[score]
        deviations = np.sqrt(of_score["logit_variance"]["mean"])
        logits.plot(scales, deviations, color=plotting.COLORS[index],
                    marker=plotting.MARKERS[index], markersize=5, label=name)  # fmt: skip
        _mean(entropy, scales, of_score["entropy"], index, name)
    length = config["source_length"]
    _theory(entropy, scales, [math.log(length)] * len(scales), f"uniform, log {length}")
    dot = kernels["scaled"]["query_kernel"]
    _mean(gradient, scales, additive["query_kernel"], 0, "additive: query kernel")
    _mean(gradient, scales, additive["v"], 2, "additive: v")
    _mean(gradient, scales, dot, 1, "scaled dot: query kernel, mean")
    _median(gradient, scales, dot, 1, "the same, median")
    means = [*additive["query_kernel"]["mean"], *additive["v"]["mean"], *dot["mean"]]
    gradient.set_ylim(min(means) / 5, max(means) * 5)  # the median falls far below
    x = "factor on the initial kernels"
    title = f"Tanh units with |tanh| > {questions.TANH_BOUND}"
    _label(units, title, x, "share", log="x")
    _label(logits, "Logits within a row", x, "standard deviation", log="xy")
    _label(entropy, "Entropy of the weights", x, "nats", log="x")
    _label(gradient, "Gradient into the parameters", x, "norm", log="xy")
    return figure


def _padding(config: JSON, padding: JSON) -> Figure:
    figure, axes = plotting.new_figure(9.6, 7.6, rows=2, columns=2)
    arms = {name: arm for name, arm in padding.items() if name.startswith("unmasked")}
    labels = [
        f"{attention}\npadded to {name.split(', ')[1]}"
        for name in arms
        for attention in ("cross", "encoder")
    ]
    steps = config["padding_steps"]
    for look, when in enumerate(("at initialisation", f"after {steps} steps")):
        groups = {
            label: np.array(
                [arm[place][what][look] for arm in arms.values() for place in _ATTENTIONS.values()]
            )
            for label, what in (("keys", "keys"), ("weights", "weights"), ("|dlogits|", "gradient"))
        }
        _bars(axes[look], labels, groups)
        _label(axes[look], f"No mask: share at padding {when}", "", "share")
        axes[look].set_ylim(0, 1)
    by_arm = {
        _arm_name(name): np.array([arm["signal_to_noise"][group][0] for group in questions.GROUPS])
        for name, arm in padding.items()
    }
    _bars(axes[2], [group.replace(" ", "\n") for group in questions.GROUPS], by_arm)
    _label(axes[2], "Gradient at initialisation", "", "signal to noise of a batch")
    losses = {
        label: np.array([arm[what][-1] for arm in padding.values()])
        for label, what in (("padded as in training", "padded"), ("bare", "bare"))
    }
    _bars(axes[3], [_arm_name(name).replace(", ", ",\n") for name in padding], losses)
    _label(axes[3], "Shortest strings, after training", "", "loss (nats per token)", log="y")
    return figure


def _arm_name(name: str) -> str:
    mask, width = name.split(", ")
    return f"{'mask' if mask == 'masked' else 'no mask'}, padded to {width}"


def _curvature(config: JSON, curvature: JSON) -> Figure:
    figure, axes = plotting.new_figure(9.6, 7.2, rows=2, columns=2)
    whens = ("at initialisation", f"after {config['curvature_steps']} steps")
    names = [_NAMES.get(score, score) for score in curvature]

    def draw(ax: Axes, values: Sequence[Any], index: int, label: str) -> None:
        """Draws values [scores, seeds]: one point per seed, and a bar at the mean."""
        for position, seeds in enumerate(np.array(values)):
            x = position + 0.24 * (index % 2) - 0.12
            ax.plot([x] * len(seeds), seeds, linestyle="", markersize=6, alpha=0.7,
                    marker=plotting.MARKERS[index], color=plotting.COLORS[index],
                    label=label if position == 0 else None)  # fmt: skip
            ax.hlines(seeds.mean(), x - 0.1, x + 0.1, color=plotting.COLORS[index], linewidth=2)

    edges, trace, ratio, loss = axes
    scores = list(curvature.values())
    for look, when in enumerate(whens):
        draw(edges, [arm["largest"][look] for arm in scores], look, f"largest, {when}")
        draw(
            edges,
            [arm["smallest"][look] for arm in scores],
            look + 2,
            f"smallest, {when}",
        )
        per_parameter = [np.divide(arm["trace"][look], arm["parameters"][look]) for arm in scores]
        draw(trace, per_parameter, look, when)
        draw(
            ratio,
            [np.divide(arm["largest"][look], arm["rms"][look]) for arm in scores],
            look,
            when,
        )
        draw(loss, [arm["loss"][look] for arm in scores], look, when)
    edges.set_yscale("symlog", linthresh=10)
    trace.set_yscale("log" if min(np.min(arm["trace"]) for arm in scores) > 0 else "linear")
    loss.set_yscale("log")
    _label(edges, "Edges of the Hessian's spectrum", "", "eigenvalue")
    _label(trace, "Mean eigenvalue: trace per parameter", "", "eigenvalue")
    _label(ratio, "Largest eigenvalue over the rms of all", "", "ratio")
    _label(loss, "Loss where the Hessian was taken", "", "nats per token")
    for ax in axes:
        ax.set_xticks(range(len(names)), names)
        ax.set_xlim(-0.5, len(names) - 0.5)
    edges.legend(fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return figure


def _mean(ax: Axes, x: Sequence[float], numbers: JSON, index: int, label: str) -> None:
    """Draws a line with a band of ± 1.96 standard errors."""
    mean, half = np.array(numbers["mean"]), 1.96 * np.array(numbers["error"])
    color = plotting.COLORS[index]
    ax.plot(x, mean, color=color, marker=plotting.MARKERS[index], markersize=5, label=label)
    ax.fill_between(x, np.maximum(mean - half, 0), mean + half, color=color, alpha=0.2, linewidth=0)


def _median(ax: Axes, x: Sequence[float], numbers: JSON, index: int, label: str) -> None:
    ax.plot(x, numbers["median"], color=plotting.COLORS[index], linestyle=":", label=label)


def _theory(ax: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    ax.plot(x, y, color="black", linestyle="--", linewidth=1.2, label=label)


def _bars(ax: Axes, labels: Sequence[str], groups: dict[str, np.ndarray]) -> None:
    """Draws the means over seeds of each group [labels, seeds], ± one deviation."""
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups.items()):
        x = np.arange(len(labels)) + (index - (len(groups) - 1) / 2) * width
        ax.bar(x, values.mean(-1), width, yerr=values.std(-1, ddof=1), capsize=3,
               color=plotting.COLORS[index], label=name)  # fmt: skip
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
