"""The attention of a model while it reads a batch: a page to explore it, and heat maps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.analysis import AttentionView, Captured, capture, view
from attention_jax.runs.run_folder import read_config
from attention_jax.training.run import TrainedRun, load_run, load_states
from attention_jax.training.task import Answers, Labels, Params, Task

# Axis labels of the heat maps of `cross_attention`.
AXES: dict[str, Any] = {"ylabel": "token written (query)", "xlabel": "token read (key)"}


def viewer(task: Task, batch: Any, labels: Labels, title: str) -> Callable[[Params], AttentionView]:
    """Returns a function from one seed's parameters to a view of every attention.

    The view has one example per label. A row of the decoder's attentions has the label of the token
    that it predicts; in a decoder that reads its source in the same sequence, of the token that it
    reads. The function compiles once for all parameters of the same shapes.
    """
    captured = _captured(task, batch)

    def view_of(params: Params) -> AttentionView:
        attentions = jax.device_get(captured(params))
        return AttentionView.by_example(
            {
                name: view(attentions, _tokens(task, batch, *sides), example=index, title=title)
                for index, (name, sides) in enumerate(labels.items())
            }
        )

    return view_of


def _tokens(task: Task, batch: Any, rows: list[str], columns: list[str]) -> dict[str, Any]:
    """The labels of queries and keys of each attention."""
    if task.model.architecture == "decoder":
        source = batch.source.shape[1]
        if not source:
            return {"*": (rows, columns)}
        # One sequence: the source, padded, and then the target.
        read = [*columns, *["PAD"] * (source - len(columns)), "SOS", *rows[:-1]]
        return {"*": (read, read)}
    return {
        "encoder_*": (columns, columns),
        "*/cross_attention": (rows, columns),
        "decoder_*": (rows, ["SOS", *rows[:-1]]),
    }


def answers_view(
    run: TrainedRun,
    answers: Answers,
    *,
    seed_index: int = 0,
    compare: Sequence[Path] = (),
    all_steps: bool = False,
) -> AttentionView:
    """All attentions while a model reads inputs and the answers that `run` gave to them.

    Every panel and every step reads the same answers, so that their rows can be compared. The title
    says which step and seed has answered.

    Args:
        run: the run.
        answers: from `Task.answers`.
        seed_index: which of each run's seeds.
        compare: folders of further runs, whose newest checkpoints are shown beside that of `run`.
        all_steps: show step 0 and all kept checkpoints of every run under a slider.

    Raises:
        ValueError: a folder holds no run, or a run of another task, with another vocabulary or
            with too few seeds.
    """
    views: dict[str, AttentionView] = {}
    for each in (run, *map(load_run, compare)):
        if type(each.task) is not type(run.task):
            raise ValueError(
                f"compare must name runs of task {run.task.name}; {each.workdir} is one of"
                f" {each.task.name}"
            )
        if _vocabulary(each) != _vocabulary(run):
            raise ValueError(
                f"compare must name runs with the vocabulary of {run.workdir}; {each.workdir} has"
                " another"
            )
        described = each.describe(seed_index)
        view_of = viewer(each.task, answers.batch, answers.labels, f"Attention in {described}")
        label = each.task.label if all_steps else described
        label = label if label not in views else f"{label} ({each.workdir})"
        views[label] = view_of(each.params_of(seed_index))
        if all_steps and each.workdir is not None:
            _, states = load_states(each.workdir)
            by_step = {
                str(step): view_of(jax.tree.map(lambda leaf: leaf[seed_index], state.params))
                for step, state in states.items()
            }
            views[label] = AttentionView.step_by_step(by_step)
    return AttentionView.side_by_side(views)


def _vocabulary(run: TrainedRun) -> tuple[Any, ...]:
    """What gives the ids of a batch their meaning."""
    stored = {} if run.workdir is None else read_config(run.workdir)
    names = ("vocabulary", "vocabulary_size")
    return (stored.get("subwords_sha256"), *(getattr(run.task, name, None) for name in names))


def cross_attention(
    task: Task, params: Params, batch: Any, labels: Labels
) -> dict[str, tuple[np.ndarray, list[str], list[str]]]:
    """Weights of the last layer's attention to the source, the mean over heads.

    Args:
        task: the task.
        params: of one seed.
        batch: from `Task.examples` or `Task.answers`.
        labels: of its first rows.

    Returns:
        by example, (weights [T, S], labels of rows, labels of columns), for
        `plotting.weight_heatmaps`.
    """
    attentions = _captured(task, batch)(params).attentions
    weights = mean_over_heads(attentions[last_attention(attentions)].weights)
    shown = labelled_pairs(task, batch, labels, weights)
    return {name: (shown[name], *sides) for name, sides in labels.items()}


def labelled_pairs(task: Task, batch: Any, labels: Labels, pairs: Any) -> dict[str, np.ndarray]:
    """The rows and columns of pairs [B, T, S] that have labels, by example.

    In a decoder alone, the rows of the source precede those of the target, which have the labels.
    """
    first = batch.source.shape[1] if task.model.architecture == "decoder" else 0
    return {
        name: np.asarray(pairs)[index, first:][: len(rows), : len(columns)]
        for index, (name, (rows, columns)) in enumerate(labels.items())
    }


def last_attention(names: Any) -> str:
    """The name of the last layer's cross attention; of its self attention in a decoder alone."""
    cross = [name for name in names if name.endswith("cross_attention")]
    return max(cross or list(names), key=lambda name: (len(name), name))


def mean_over_heads(pairs: Any) -> Any:
    """[B, T, S] or [B, N, T, S] -> [B, T, S]; None stays None."""
    return pairs if pairs is None or pairs.ndim == 3 else pairs.mean(axis=1)


def _captured(task: Task, batch: Any) -> Callable[[Params], Captured]:
    return jax.jit(lambda params: capture(task.bind(params), *batch.inputs))
