"""A page on the gradients of several runs: figures and tables of the numbers it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.analysis import AttentionView, view
from attention_jax.reports import html_page, plotting
from attention_jax.training.metrics import mean_and_deviation

JSON = dict[str, Any]

_ATTENTION = "cross attention"
_STATISTICS = {
    "entropy": "entropy (nats)",
    "saturation": "saturated rows (share)",
    "logit_sd": "sd of a row's logits",
    "jacobian_norm": "softmax Jacobian (norm)",
    "dlogits_norm": "a row's dlogits (norm)",
}


def report(runs: Sequence[JSON], *, command: str) -> str:
    """The page as HTML.

    Args:
        runs: the numbers of each run, as `tasks.gradients.analyze_run` returns them.
        command: the command line that makes the page again.
    """
    named = [{**run, "label": label} for run, label in zip(runs, _labels(runs), strict=True)]
    return html_page.page("Gradients of attention", list(_parts(named, command)))


def _labels(runs: Sequence[JSON]) -> list[str]:
    """The label of each run, with its folder if two runs have the same label."""
    labels = [run["label"] for run in runs]
    return [
        label if labels.count(label) == 1 else f"{label} ({run['workdir']})"
        for run, label in zip(runs, labels, strict=True)
    ]


def _parts(runs: Sequence[JSON], command: str) -> Iterator[str]:
    yield html_page.command(command)
    yield html_page.table(
        ("run", "folder", "seeds", "step"),
        [(run["label"], run["workdir"], str(run["seeds"]), str(run["step"])) for run in runs],
    )
    yield html_page.paragraph(
        "Lines are means over seeds, bands are one standard deviation. Statistics are taken on the"
        " batch of the next step, over the rows that the loss depends on and that may attend to"
        " more than one key."
    )
    yield html_page.heading("Gradient norms by group of parameters")
    yield html_page.figure(
        norms_by_step(runs),
        "The norm of the loss's gradient in each group of parameters against the training step.",
    )
    yield html_page.heading("Statistics of the attention weights")
    yield html_page.figure(
        statistics_by_step(runs),
        "Entropy, saturation, spread of the logits, and the gradient that passes the softmax, for"
        " each attention against the training step. A row is saturated if one weight exceeds 0.99.",
    )
    yield html_page.heading("Attention weights, and the gradient in their logits")
    yield html_page.frame(examples_view(runs).to_frame(), _examples_caption(runs))
    yield from _scale_parts(runs)
    yield from _curvature_parts(runs)


def _examples_caption(runs: Sequence[JSON]) -> str:
    caption = (
        "Cross-attention weights of the examples, before training and after, of the first seed;"
        " means over heads, if there are any."
    )
    tables = [table for run in runs for table in run["examples"][str(run["step"])].values()]
    if any(table["dlogits"] is not None for table in tables):
        caption += (
            " The gradient is that of the loss in the logits. Red: the loss wants this logit lower;"
            " blue: higher."
        )
    return caption


def norms_by_step(runs: Sequence[JSON]) -> Figure:
    """One panel per group of parameters, one line per run."""
    groups = list(dict.fromkeys(group for run in runs for group in run["gradient_norms"]))
    columns = min(4, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plotting.new_figure(11, 2.8 * rows, rows=rows, columns=columns, sharex=True)
    for unused in axes[len(groups) :]:
        unused.remove()
    axes = axes[: len(groups)]
    for ax, group in zip(axes, groups, strict=True):
        for index, run in enumerate(runs):
            if group in run["gradient_norms"]:
                norms = np.array(run["gradient_norms"][group], float)
                _draw(ax, run, norms, index, log=True)
        ax.set_yscale("log")
        ax.set_title(group, fontsize=10)
    return _finished(figure, axes, runs, "gradient norm", columns=columns)


def statistics_by_step(runs: Sequence[JSON]) -> Figure:
    """One row per attention, one column per statistic, one line per run."""
    attentions = list(dict.fromkeys(name for run in runs for name in run["attentions"]))
    columns = len(_STATISTICS)
    figure, axes = plotting.new_figure(
        2.3 * columns,
        2.1 * len(attentions) + 0.6,
        rows=len(attentions),
        columns=columns,
        sharex=True,
    )
    for row, attention in enumerate(attentions):
        for column, (statistic, label) in enumerate(_STATISTICS.items()):
            ax, name = axes[row * columns + column], f"{attention}/{statistic}"
            for index, run in enumerate(runs):
                if name in run["by_step"]:
                    _draw(ax, run, _series(run, name), index)
            if row == 0:
                ax.set_title(label, fontsize=11)
            if column == 0:
                ax.set_ylabel(attention.replace("/", "\n"))
            if statistic == "dlogits_norm":
                ax.set_yscale("log")
            if statistic == "saturation":
                ax.set_ylim(-0.05, 1.05)
    return _finished(figure, axes, runs, None, columns=columns)


def examples_view(runs: Sequence[JSON]) -> AttentionView:
    """The weights and gradients of all examples: runs side by side, step 0 and the newest step."""

    def of_table(table: JSON) -> AttentionView:
        pairs = {
            name: np.array(table[name], float)
            for name in ("weights", "dlogits")
            if table[name] is not None
        }
        labels = (table["row_labels"], table["column_labels"])
        title = "Cross attention: queries are predicted tokens, keys are source tokens"
        return view({_ATTENTION: pairs}, {_ATTENTION: labels}, example=(), title=title)

    def of_run(run: JSON) -> AttentionView:
        steps = {"before training": "0", "after training": str(run["step"])}
        return AttentionView.step_by_step(
            {
                name: AttentionView.by_example(
                    {example: of_table(table) for example, table in run["examples"][step].items()}
                )
                for name, step in steps.items()
            }
        )

    return AttentionView.side_by_side({run["label"]: of_run(run) for run in runs})


def _scale_parts(runs: Sequence[JSON]) -> Iterator[str]:
    yield html_page.heading("The gradient as a function of the scale of the logits")
    swept = [run for run in runs if run["scale_sweep"][str(run["step"])] is not None]
    if not swept:
        yield html_page.paragraph("None of these attentions has a softmax over its logits.")
        return
    left_out = [run["label"] for run in runs if run not in swept]
    if left_out:
        yield html_page.paragraph(f"Without a softmax over their logits: {', '.join(left_out)}.")
    yield html_page.figure(
        scale_curves(swept),
        "The norm of the softmax's Jacobian, through which all gradient to the score passes, and"
        " the entropy, with the cross attention's logits scaled up or down. Open markers: the model"
        " before training; filled markers: after.",
    )


def scale_curves(runs: Sequence[JSON]) -> Figure:
    """Jacobian norm and entropy against the logits' standard deviation; markers: no scaling."""
    figure, axes = plotting.new_figure(10, 4, columns=2)
    labels = {"jacobian_norm": "norm of the softmax's Jacobian", "entropy": "entropy (nats)"}
    for ax, (name, label) in zip(axes, labels.items(), strict=True):
        for index, run in enumerate(runs):
            sweeps = run["scale_sweep"]
            scales = np.array(sweeps["scales"])
            color = plotting.COLORS[index % len(plotting.COLORS)]
            marker = plotting.MARKERS[index % len(plotting.MARKERS)]
            for step, style, face in (("0", ":", "white"), (str(run["step"]), "-", color)):
                sweep = sweeps[step]
                sd = float(np.mean(sweep["logit_sd"]))
                values = np.mean(np.array(sweep[name], float), axis=0)
                label_of_run = run["label"] if style == "-" else None
                ax.plot(scales * sd, values, style, color=color, label=label_of_run)
                unscaled = np.interp(0.0, np.log(scales), values)  # at scale 1
                ax.plot(sd, unscaled, marker, color=color, markerfacecolor=face, markersize=8)
        ax.set(xscale="log", xlabel="standard deviation of a row's logits", ylabel=label)
        ax.grid(alpha=0.3)
    axes[0].legend(title="solid: trained, dotted: at step 0")
    return figure


def _curvature_parts(runs: Sequence[JSON]) -> Iterator[str]:
    measured = [run for run in runs if "curvature" in run]
    if not measured:
        return
    yield html_page.heading("Curvature of the loss")
    yield html_page.paragraph(
        "The extreme eigenvalues of the Hessian of one batch's loss in all parameters (Lanczos),"
        " and its trace (Hutchinson): mean ± standard deviation over seeds. Gradient descent is"
        " stable up to a learning rate of 2 / largest eigenvalue."
    )
    rows = [
        (run["label"], step, *(_cell(curvature[name]) for name in ("largest", "smallest", "trace")))
        for run in measured
        for step, curvature in run["curvature"].items()
    ]
    yield html_page.table(
        ("run", "step", "largest eigenvalue", "smallest eigenvalue", "trace"), rows
    )
    yield html_page.figure(
        spectrum_edges(measured),
        "The largest and the smallest eigenvalue of the loss's Hessian, before training and after;"
        " one marker per seed.",
    )


def spectrum_edges(runs: Sequence[JSON]) -> Figure:
    """One column per run and step, one marker per seed."""
    figure, (axes,) = plotting.new_figure(max(6.0, 1.6 * len(runs) + 3), 4)
    ticks: list[str] = []
    for index, run in enumerate(runs):
        for step, curvature in run["curvature"].items():
            color = plotting.COLORS[index % len(plotting.COLORS)]
            for name, marker in (("largest", "^"), ("smallest", "v")):
                values = np.array(curvature[name], float)
                x = np.full(len(values), len(ticks))
                axes.plot(x, values, marker, color=color, alpha=0.7, linestyle="none")
            ticks.append(f"{run['label']}\nstep {step}")
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.margins(y=0.1)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_ylabel("eigenvalue (▲ largest, ▼ smallest)")
    axes.grid(alpha=0.3, axis="y")
    return figure


def _series(run: JSON, name: str) -> np.ndarray:
    """[steps, seeds], with NaN for numbers that are not finite."""
    return np.array(run["by_step"][name], float)


def _draw(ax: Axes, run: JSON, values: np.ndarray, index: int, *, log: bool = False) -> None:
    steps = run["by_step"]["steps"]
    plotting.draw_band(ax, steps, values, index=index, label=run["label"], log=log)


def _finished(
    figure: Figure, axes: list[Axes], runs: Sequence[JSON], ylabel: str | None, *, columns: int
) -> Figure:
    for ax in axes:
        ax.grid(alpha=0.3)
    for ax in axes[-columns:]:
        ax.set_xlabel("step")
    if ylabel is not None:
        for ax in axes[::columns]:
            ax.set_ylabel(ylabel)
    if len(runs) > 1:
        lines: dict[str, Any] = {}  # a run may be missing from a panel
        for ax in axes:
            handles, labels = ax.get_legend_handles_labels()
            lines = {**dict(zip(labels, handles, strict=True)), **lines}
        shown = [run["label"] for run in runs if run["label"] in lines]
        handles = [lines[label] for label in shown]
        figure.legend(handles, shown, loc="outside upper center", ncols=min(len(shown), 4))
    return figure


def _cell(values: Sequence[float | None]) -> str:
    mean, deviation = mean_and_deviation(np.array(values, float))
    return f"{mean:.3g} ± {deviation:.2g}"
