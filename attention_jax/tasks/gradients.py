"""Gradients at a run's checkpoints: the numbers of a report, ready for JSON."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import CapturedGradients, capture_gradients, logit_size, logit_variance
from attention_jax.analysis.capture import computation_order
from attention_jax.analysis.curvature import edges_and_trace
from attention_jax.analysis.gradients import sweep_of_captured
from attention_jax.core.checks import check_integer
from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.pages import labelled_pairs, last_attention, mean_over_heads
from attention_jax.training.run import TrainedRun, load_states
from attention_jax.training.step import TrainState, batches_of_step, gradient_statistics
from attention_jax.training.task import JSON, Labels, Params, Task

Array = jax.Array

# Groups of parameters, as regular expressions for their paths in the model. A parameter belongs to
# the first group that matches, and if none does, it is a group of its own.
_PARAMETER_GROUPS = {
    "embeddings": r"(source|target)_embedding",
    "positions": r"placement",
    "encoder, self attention": r"encoder/\d+/self_attention",
    "encoder, feed-forward": r"encoder/\d+/feed_forward(/|$)",
    "decoder, self attention": r"decoder/\d+/self_attention",
    "decoder, cross attention": r"decoder/\d+/cross_attention",
    "decoder, feed-forward": r"decoder/\d+/feed_forward(/|$)",
    "normalisation": r"(.*_norm|.*_residual)",
    "output layer": r"logits",
}


@dataclasses.dataclass(frozen=True)
class GradientAnalysis:
    """Settings of the analysis.

    Attributes:
        iterations: Lanczos iterations for the extreme eigenvalues of the Hessian; 0 leaves
            curvature out.
        samples: random vectors for the Hessian's trace.
    """

    iterations: int = 20
    samples: int = 8

    def __post_init__(self) -> None:
        check_integer("iterations", self.iterations, 0)
        check_integer("samples", self.samples, 2)


class Run(NamedTuple):
    """A run to analyse."""

    workdir: Path
    task: Task
    states: dict[int, TrainState]  # by step
    batch: Any  # of the task's examples
    labels: Labels  # of its first rows, which are drawn
    loss: Callable[..., Any]  # (params, batch), without dropout
    description: str  # of `TrainedRun.describe`


def load_analyzed_run(workdir: Path, *, score: str | None = None) -> Run:
    """Loads a run for analysis.

    Args:
        workdir: the run's folder.
        score: as in `load_run`.

    Raises:
        ValueError: the folder holds no run, or none that can be read; or the data that the run
            learned from is missing or has changed.
    """
    task, states = load_states(workdir, score=score)
    batch, labels = task.examples(workdir)
    model = dataclasses.replace(task.model, dropout_rate=0.0, attention_dropout_rate=None)
    still: Task = dataclasses.replace(task, model=model)  # type: ignore[type-var]
    rng = jax.random.key(0)  # draws position ids, where the model does
    # In NumPy, so that JAX compiles each program once for initial and for restored states.
    states = jax.device_get(states)

    def loss(params: Params, batch: Any) -> Any:
        return still.loss(params, batch, rng)

    described = TrainedRun(task, None, max(states), workdir).describe()
    return Run(workdir, task, states, batch, labels, loss, described)


def analyze_run(run: Run, analysis: GradientAnalysis, *, progress: Callable[[str], None]) -> JSON:
    """All numbers of one run; every list over seeds has one entry per seed.

    Args:
        run: from `load_analyzed_run`.
        analysis: settings.
        progress: called with a line about what is being computed.

    Returns:
        {"label", "workdir", "description", "step", "seeds",
        "by_step": {"steps", statistic: [steps][seeds]},
        "gradient_norms": {group of parameters: [steps][seeds]}, "attentions": their names,
        "examples": {step: {example: {"row_labels", "column_labels", "weights", "dlogits"}}},
        "logit_size": {step: {attention with a softmax: {"deviation", "query_share": [seeds]}}},
        "scale_sweep": {"scales", step: {statistic: [seeds][scales]}}, "curvature": {step:
        {statistic: [seeds]}}}, where step is "0" or the newest. Numbers that are not finite are
        None, and so are those that need a softmax if the attention has none.
    """
    newest, label = max(run.states), run.task.label

    def look(what: str, numbers_of: Callable[[Params], Any]) -> JSON:
        progress(f"{label}: {what}")
        compiled = jax.jit(numbers_of)
        return {str(step): compiled(run.states[step].params) for step in (0, newest)}

    progress(f"{label}: gradients by step")
    by_step = _by_step(run)
    drawn = f"weights and gradients of {', '.join(run.labels)}"
    tables = look(drawn, functools.partial(_of_examples, run))
    logits = look("sizes and scales of the logits", jax.vmap(functools.partial(_of_logits, run)))
    sizes, sweeps = (
        {step: each[name] for step, each in logits.items()} for name in ("sizes", "sweep")
    )
    attentions = [name.rpartition("/")[0] for name in by_step if name.endswith("/entropy")]
    numbers: JSON = {
        "label": label,
        "workdir": str(run.workdir),
        "description": run.description,
        "step": newest,
        "seeds": run.task.train.seeds,
        "by_step": by_step,
        "gradient_norms": _norms_by_group(by_step),
        "attentions": sorted(attentions, key=computation_order),
        "examples": {step: _example_tables(run, table) for step, table in tables.items()},
        "logit_size": _rounded(sizes),
        "scale_sweep": _rounded({"scales": _SCALES, **sweeps}),
    }
    if analysis.iterations:
        curvature = functools.partial(_curvature, run, analysis)
        numbers["curvature"] = _rounded(look("curvature of the loss", jax.vmap(curvature)))
    return numbers


def _by_step(run: Run) -> JSON:
    """{"steps", statistic: [steps][seeds]}, logged while training or computed at checkpoints."""
    look = jax.jit(functools.partial(gradient_statistics, run.task))
    lines = {line.pop("step"): line for line in read_lines(run.workdir / "gradients.jsonl")}
    missing_steps = [step for step in run.states if step not in lines]
    feed = run.task.feed(run.workdir) if missing_steps else None
    for step in missing_steps:
        lines[step] = look(run.states[step], batches_of_step(run.task, feed, step))
    steps = sorted(lines)
    missing = [None] * run.task.train.seeds
    names = sorted({name for line in lines.values() for name in line})
    table = {name: [lines[step].get(name, missing) for step in steps] for name in names}
    return {"steps": steps, **_rounded(table)}


def _norms_by_group(by_step: JSON) -> JSON:
    """{group: [steps][seeds]}: the gradient norm of each group of parameters in the model."""
    squares: dict[str, list[np.ndarray]] = {group: [] for group in _PARAMETER_GROUPS}
    for name, norms in by_step.items():
        if name.startswith("gradient_norm/"):
            path = name.removeprefix("gradient_norm/")
            matching = (g for g, pattern in _PARAMETER_GROUPS.items() if re.match(pattern, path))
            squares.setdefault(next(matching, path), []).append(np.array(norms, float) ** 2)
    return {group: _rounded(np.sqrt(sum(parts))) for group, parts in squares.items() if parts}


def _of_examples(run: Run, params: Params) -> dict[str, Any]:
    """The first seed's weights in its last attention, and their logits' gradients: [B, T, S]."""
    params = jax.tree.map(lambda leaf: leaf[0], params)
    drawn = jax.tree.map(lambda leaf: leaf[: len(run.labels)], run.batch)
    captured = capture_gradients(run.loss, params, drawn)
    name = last_attention(captured.attentions)
    return {
        "weights": mean_over_heads(captured.attentions[name].weights),
        "dlogits": mean_over_heads(captured.gradients[name].dlogits),
    }


def _example_tables(run: Run, tables_of: dict[str, Any]) -> JSON:
    """Each example's numbers and labels; rows and columns without a label are left out."""
    shown = {
        name: {} if pairs is None else labelled_pairs(run.task, run.batch, run.labels, pairs)
        for name, pairs in tables_of.items()
    }
    return {
        example: {
            "row_labels": rows,
            "column_labels": columns,
            **{name: _rounded(pairs.get(example)) for name, pairs in shown.items()},
        }
        for example, (rows, columns) in run.labels.items()
    }


def _of_logits(run: Run, params: Params) -> dict[str, Any]:
    """The sizes of one seed's logits, and a sweep over their scale."""
    captured = capture_gradients(run.loss, params, run.batch)
    return {"sizes": _logit_sizes(captured), "sweep": _scale_sweep(captured)}


def _logit_sizes(captured: CapturedGradients) -> dict[str, dict[str, Array]]:
    """Of all attentions, over all examples and heads, and the rows that the loss reads."""
    sizes = {}
    for name, attention in captured.attentions.items():
        if attention.logits is not None:
            rows = jnp.any(captured.gradients[name].doutput != 0, axis=-1)
            axes = range(attention.logits.ndim - 2)
            sizes[name] = logit_size(attention.logits, rows=rows, axis=axes)._asdict()
    return sizes


_SCALES = np.geomspace(1 / 64, 64, 37)


def _scale_sweep(captured: CapturedGradients) -> dict[str, Array] | None:
    """Jacobian norm and entropy of the last attention with scaled logits: [scales]."""
    name = last_attention(captured.attentions)
    attention, gradient = captured.attentions[name], captured.gradients[name]
    if attention.logits is None or attention.mask is None:
        return None
    mask = attention.mask & jnp.any(gradient.doutput != 0, axis=-1)[..., None]
    logits = jnp.where(mask, attention.logits, 0)
    sweep = sweep_of_captured(logits, mask, gradient.dweights, jnp.asarray(_SCALES))
    variance = logit_variance(logits, mask, per_row=True)
    return {
        "logit_sd": jnp.sqrt(jnp.mean(variance, where=jnp.any(mask, axis=-1))),
        "jacobian_norm": sweep.jacobian_norm,
        "entropy": sweep.entropy,
    }


def _curvature(run: Run, analysis: GradientAnalysis, params: Params) -> dict[str, Array]:
    """Hessian of one seed's loss of the batch in all parameters: each []."""
    rngs = jax.random.split(jax.random.key(0))

    def loss(params: Params) -> Array:
        return run.loss(params, run.batch)[0]

    edges, trace = edges_and_trace(
        loss, params, (rngs[0], rngs[1]), analysis.iterations, analysis.samples
    )
    return {
        "largest": edges.largest,
        "largest_error": edges.residuals[-1],
        "smallest": edges.smallest,
        "smallest_error": edges.residuals[0],
        "trace": trace.mean,
        "trace_error": trace.standard_error,
    }


def _rounded(numbers: Any) -> Any:
    """Nested lists of floats with six digits; None for numbers that are not finite."""
    if numbers is None:
        return None
    if isinstance(numbers, dict):
        return {name: _rounded(value) for name, value in numbers.items()}
    array = np.asarray(numbers, np.float64)  # None becomes NaN
    if array.ndim:
        return [_rounded(row) for row in array]
    return float(f"{array:.6g}") if np.isfinite(array) else None
