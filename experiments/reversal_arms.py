"""One arm of an experiment on reversal: a run in a folder, and its numbers as JSON keeps them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.reversal.evaluation import Evaluation, Reversed
from attention_jax.tasks.reversal.task import REVERSAL, ReversalConfig, ReversalRun
from attention_jax.training.run import train_run

JSON = dict[str, Any]

TRAINED_LENGTHS = range(ReversalConfig.min_length, ReversalConfig.max_length + 1)
EXTRAPOLATION_LENGTH = 10


def trained_arm(config: ReversalConfig, workdir: Path) -> tuple[ReversalRun, JSON]:
    """Trains in a folder, or loads what is finished there; exits where a signal asked to stop.

    Returns:
        the run, and {"steps", "loss", "seconds", "steps_per_second"}.
    """
    trained = train_run(REVERSAL, config, workdir, resume=True)
    if trained.interrupted:
        print("stopped by a signal; the same command goes on from here", file=sys.stderr)
        sys.exit(trained.interrupted)
    lines = read_lines(workdir / "metrics.jsonl")
    sessions = read_lines(workdir / "timing.jsonl")  # more than one if it was stopped and resumed
    return trained, {
        "steps": [line["step"] for line in lines],
        "loss": [line["loss"] for line in lines],
        "seconds": _seconds(sessions, config.loop.steps),
        "steps_per_second": sessions[-1]["steps_per_second"] if sessions else None,
    }


def accuracies(evaluations: dict[int, Evaluation]) -> JSON:
    """{metric: {length: one number a seed}}"""
    return {
        metric: {
            str(length): [round(float(share), 6) for share in getattr(evaluation, metric)]
            for length, evaluation in evaluations.items()
        }
        for metric in Evaluation._fields
    }


def mean_over_lengths(accuracy: JSON, metric: str, lengths: Sequence[int]) -> np.ndarray:
    """One number a seed."""
    return np.mean([accuracy[metric][str(length)] for length in lengths], axis=0)


def heat_map(answer: Reversed) -> JSON:
    """A word's weights and what its rows write."""
    weights = np.asarray(answer.weights).round(4).tolist()
    return {"row_labels": answer.row_labels, "weights": weights}


def _seconds(sessions: list[JSON], steps: int) -> float | None:
    """The time of all sessions; None if one that was killed has left no line."""
    done = sum(session["to_step"] - session["from_step"] for session in sessions)
    return sum(session["seconds"] for session in sessions) if done == steps else None
