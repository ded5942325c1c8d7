"""Statistics of gradients, computed every so many steps without changing the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attention_jax.runs.metrics_file import MetricsFile


class GradientLog(NamedTuple):
    """What to log, and how often.

    `statistics` maps (loss, params, batch, rng) of one seed to {name: float []}. It is pure, and
    `loss` is that of the task.
    """

    every: int  # steps, a multiple of `log_every`
    statistics: Callable[..., dict[str, Any]]
    file: MetricsFile | None  # None on processes that write nothing


def check_log_gradients(every: int, log_every: int) -> None:
    """Raises ValueError unless statistics can be logged every so many steps."""
    if every < 1 or every % log_every:
        raise ValueError(
            f"log_gradients must be a positive multiple of log_every {log_every}; got {every}"
        )
