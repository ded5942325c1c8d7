"""A page on the gradients of several runs: figures and tables of their numbers."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_jax.analysis import AttentionView, view
from attention_jax.reports import html_page, plotting
from attention_jax.training.metrics import mean_and_deviation

JSON = dict[str, Any]

_ATTENTION = "attention"
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
    runs = [{**run, "label": f"{run['label']} ({run['workdir']})"} for run in runs]
    return html_page.page("Gradients of attention", list(_parts(runs, command)))


def _parts(runs: Sequence[JSON], command: str) -> Iterator[str]:
    yield html_page.code(command)
    yield html_page.table(
        ("run (folder)", "checkpoint"),
        [(run["label"], run["description"]) for run in runs],
    )
    yield html_page.paragraph(
        "Lines are means over seeds, bands are one standard deviation, on a logarithmic axis of the"
        " logarithms. A seed whose number is not finite, or is 0 on such an axis, does not count."
        " Statistics are taken on the batch of the next step, over the rows that the loss depends"
        " on and that may attend to more than one key."
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
    if any(sizes for run in runs for sizes in run["logit_size"].values()):
        yield html_page.heading("Size of the logits")
        yield html_page.paragraph(
            "The deviation of the logits within rows, and the share of its square that depends on"
            " the query: the rest ranks the keys equally for all queries. Over all heads and"
            " examples of a batch; mean ± standard deviation over seeds."
        )
        yield logit_size_table(runs)
    yield html_page.heading("Attention weights, and the gradient in their logits")
    yield html_page.frame(
        examples_view(runs).to_frame(),
        "The examples' weights in the last cross attention (of a decoder alone, in its last self"
        " attention), before training and after, of the first seed; means over heads, if there are"
        " any. Where there is a softmax, also the gradient of the loss in the logits. Red: a lower"
        " logit lowers the loss; blue: a higher one does.",
    )
    yield html_page.heading("The gradient as a function of the scale of the logits")
    with_softmax = [run for run in runs if run["scale_sweep"][str(run["step"])] is not None]
    without = [run["label"] for run in runs if run not in with_softmax]
    if without:
        yield html_page.paragraph(f"Without a softmax over their logits: {', '.join(without)}.")
    if with_softmax:
        yield html_page.figure(
            scale_curves(with_softmax),
            "The norm of the softmax's Jacobian, through which all gradient to the score passes,"
            " and the entropy, with the logits of this attention scaled up or down. Open markers:"
            " the model before training; filled markers: after.",
        )
    if any("curvature" in run for run in runs):
        yield html_page.heading("Curvature of the loss")
        yield html_page.paragraph(
            "The extreme eigenvalues of the Hessian of one batch's loss in all parameters"
            " (Lanczos), and its trace (Hutchinson): mean ± standard deviation over seeds. Gradient"
            " descent is stable up to a learning rate of 2 / largest eigenvalue."
        )
        yield curvature_table(runs)


def norms_by_step(runs: Sequence[JSON]) -> Figure:
    """One panel per group of parameters, one line per run."""
    groups = {group: group for run in runs for group in run["gradient_norms"]}
    return _panels_by_step(runs, groups, columns=4)


def statistics_by_step(runs: Sequence[JSON]) -> Figure:
    """One row per attention, one column per statistic, one line per run."""
    attentions = dict.fromkeys(name for run in runs for name in run["attentions"])
    titles = {
        f"{attention}/{statistic}": f"{attention}\n{label}"
        for attention in attentions
        for statistic, label in _STATISTICS.items()
    }
    return _panels_by_step(runs, titles, columns=len(_STATISTICS))


@plotting.own_settings
def _panels_by_step(runs: Sequence[JSON], titles: Mapping[str, str], *, columns: int) -> Figure:
    """One panel per title, of a group of parameters or a statistic; one line per run that has it.

    The axis of a norm of gradients is logarithmic.
    """
    rows = -(-len(titles) // columns)
    shape: Any = {"rows": rows, "columns": columns}
    figure, axes = plotting.new_figure(11.5, 2.3 * rows + 0.6, grid=True, **shape)
    for unused in axes[len(titles) :]:
        unused.remove()
    lines: dict[int, Any] = {}
    norms = {group for run in runs for group in run["gradient_norms"]}
    series = [run["by_step"] | run["gradient_norms"] for run in runs]
    for ax, (name, title) in zip(axes, titles.items(), strict=False):
        is_log = name in norms or name.endswith("/dlogits_norm")
        options: Any = {"log": is_log, "limits": (0, 1 if name.endswith("/saturation") else np.inf)}
        for index, run in enumerate(runs):
            if name in series[index]:
                values = np.array(series[index][name], float)  # NaN for numbers that are not finite
                options |= {"index": index, "label": run["label"]}
                plotting.draw_band(ax, run["by_step"]["steps"], values, **options)
                lines[index] = ax.lines[-1]
        if is_log:
            ax.set_yscale("log")
        if name.endswith("/saturation"):
            ax.set_ylim(-0.05, 1.05)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("step")
    _legend(figure, [lines[index] for index in sorted(lines)])
    return figure


def _legend(figure: Figure, lines: Sequence[Any], title: str | None = None) -> None:
    labels = [textwrap.fill(line.get_label(), 45) for line in lines]
    figure.legend(lines, labels, loc="outside upper center", ncols=2, title=title)


def examples_view(runs: Sequence[JSON]) -> AttentionView:
    """The weights and gradients of all examples: runs side by side, step 0 and the newest step."""

    def of_table(table: JSON) -> AttentionView:
        names = [name for name in ("weights", "dlogits") if table[name] is not None]
        pairs = {name: np.array(table[name], float) for name in names}
        labels = (table["row_labels"], table["column_labels"])
        title = "Queries are the tokens that are predicted, keys those that are attended to"
        return view({_ATTENTION: pairs}, {_ATTENTION: labels}, example=(), title=title)

    def of_run(run: JSON) -> AttentionView:
        steps = {"before training": "0", "after training": str(run["step"])}
        return AttentionView.step_by_step(
            {
                title: AttentionView.by_example(
                    {name: of_table(table) for name, table in run["examples"][step].items()}
                )
                for title, step in steps.items()
            }
        )

    return AttentionView.side_by_side({run["label"]: of_run(run) for run in runs})


@plotting.own_settings
def scale_curves(runs: Sequence[JSON]) -> Figure:
    """Jacobian norm and entropy against the logits' standard deviation; markers: no scaling."""
    figure, axes = plotting.new_figure(10, 4.4, columns=2, grid=True)
    labels = {"jacobian_norm": "norm of the softmax's Jacobian", "entropy": "entropy (nats)"}
    for ax, (name, label) in zip(axes, labels.items(), strict=True):
        for index, run in enumerate(runs):
            scales = np.array(run["scale_sweep"]["scales"])
            color, marker = plotting.style_of(index).values()
            for step, style, face in (("0", ":", "white"), (str(run["step"]), "-", color)):
                sweep = run["scale_sweep"][step]
                sd, _ = plotting.over_seeds(np.array(sweep["logit_sd"], float))
                values, _ = plotting.over_seeds(np.array(sweep[name], float).T)
                ax.plot(scales * sd, values, style, color=color, label=run["label"])
                unscaled = np.interp(0.0, np.log(scales), values)  # at scale 1
                ax.plot(sd, unscaled, marker, color=color, markerfacecolor=face, markersize=8)
        ax.set(xscale="log", xlabel="standard deviation of a row's logits", ylabel=label)
    solid = [line for line in axes[0].lines if line.get_linestyle() == "-"]
    _legend(figure, solid, title="solid: trained, dotted: at step 0")
    return figure


def _over_seeds(values: Sequence[float | None]) -> str:
    """A cell: mean ± standard deviation over seeds."""
    mean, deviation = mean_and_deviation(np.array(values, float))
    return f"{mean:.3g} ± {deviation:.2g}" if len(values) > 1 else f"{mean:.3g}"


def logit_size_table(runs: Sequence[JSON]) -> str:
    """One row per run, attention with a softmax, and step."""
    rows = [
        (run["label"], name, step, *map(_over_seeds, (size["deviation"], size["query_share"])))
        for run in runs
        for name in run["attentions"]
        for step, sizes in run["logit_size"].items()
        for size in [sizes.get(name)]
        if size
    ]
    columns = ("run", "attention", "step", "deviation of a row's logits", "query's share")
    return html_page.table(columns, rows)


def curvature_table(runs: Sequence[JSON]) -> str:
    """One row per run and step."""
    statistics = ("largest", "smallest", "trace")
    rows = [
        (run["label"], step, *(_over_seeds(numbers[name]) for name in statistics))
        for run in runs
        for step, numbers in run.get("curvature", {}).items()
    ]
    columns = ("run", "step", "largest eigenvalue", "smallest eigenvalue", "trace")
    return html_page.table(columns, rows)
