"""Reversal for the trainer: how it is learned, and the results of a trained run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from attention_jax.analysis.learning_statistics import learning_statistics
from attention_jax.tasks.reversal.evaluation import evaluate
from attention_jax.tasks.reversal.task import (
    ReversalConfig,
    ReversalRun,
    optimizer,
    reversal_task,
    why_steps_are_fixed,
)
from attention_jax.training.run_results import training_loss
from attention_jax.training.task_definition import Result, Results, TaskDefinition


def reversal_results(run: ReversalRun) -> Results:
    """Exact match of the model's own answers at the lengths of training, and the training loss.

    The strings are those of `evaluate`: 1,000 of each length, the same for all runs.
    """
    lengths = range(run.config.min_length, run.config.max_length + 1)
    mean = np.mean(list(_percent_exact(run, lengths).values()), axis=0)
    return {"exact match (%)": _percent(mean), "training loss": training_loss(run)}


def reversal_length_results(run: ReversalRun, lengths: Sequence[int]) -> Results:
    """Exact match at each length; NaN where the learned positions end before that length."""
    possible = [length for length in lengths if _has_positions(run, length)]
    by_length = _percent_exact(run, possible) if possible else {}
    unknown = np.full(run.config.loop.seeds, np.nan)
    return {
        f"exact match, length {length} (%)": _percent(by_length.get(length, unknown))
        for length in lengths
    }


def _percent_exact(run: ReversalRun, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    by_length = evaluate(run, lengths=lengths)
    return {
        length: 100 * np.asarray(accuracies.free_running_exact, np.float64)
        for length, accuracies in by_length.items()
    }


def _percent(by_seed: np.ndarray) -> Result:
    return Result(by_seed.tolist(), larger_is_better=True, high=100.0)


def _has_positions(run: ReversalRun, length: int) -> bool:
    # Outside of training nothing is drawn, and only learned positions have a limit.
    model = dataclasses.replace(run.config.model, position_draw="none")
    try:
        model.check_length(length + 1)
    except ValueError:
        return False
    return True


# The task for `train_run` and `load_run`.
REVERSAL = TaskDefinition(
    name="reversal",
    config_class=ReversalConfig,
    task=reversal_task,
    optimizer=optimizer,
    batch_size=lambda config: config.batch_size,
    why_steps_are_fixed=why_steps_are_fixed,
    gradient_statistics=learning_statistics,
    results=reversal_results,
    length_results=reversal_length_results,
)
