"""The metrics of a run's checkpoints: which is the best, and whether patience has run out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from attention_jax.training.task import JSON, Validation


def validation_loss(rule: Validation, line: JSON) -> float:
    """The mean over seeds of the metric in a line of validation.jsonl; smaller is better."""
    mean = statistics.fmean(line[rule.metric])
    if not math.isfinite(mean):
        return math.inf  # never the best; a line read back has NaN here, with the same result
    return -mean if rule.larger_is_better else mean


def exhausted(rule: Validation | None, lines: Sequence[JSON]) -> bool:
    """Whether patience has run out since the best of the lines of validation.jsonl."""
    if rule is None or rule.patience is None or not lines:
        return False
    losses = [validation_loss(rule, line) for line in lines]
    return len(losses) - 1 - losses.index(min(losses)) >= rule.patience
