"""What every benchmark shares: its options, how it takes the time, what it reports."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attention_jax.scores import SCORES, get_score

JSON = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose; every default stands here.

    Attributes:
        scores: scores to measure: names, or "module:Name" for one of your own.
        repeats: timed repeats; the median counts.
        steps: optimiser steps (of every seed) in one repeat of a training benchmark.
        seeds: runs of ours trained at once.
    """

    scores: tuple[str, ...] = tuple(SCORES)
    repeats: int = 5
    steps: int = 100
    seeds: int = 5

    def __post_init__(self) -> None:
        if not self.scores:
            raise ValueError(f"scores must name at least one of {', '.join(SCORES)}; got none")
        for score in self.scores:
            get_score(score)
        for name in ("repeats", "steps", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


class Report(NamedTuple):
    """What a benchmark found.

    An entry that a row lacks, or that is None, is shown as a dash. The rows of one `score` stand
    together.
    """

    title: str
    columns: dict[str, tuple[str, str]]  # heading -> (a row's entry, its format specification)
    rows: list[JSON]
    settings: JSON  # what was the same in all rows
    notes: list[str]  # lines under the table


def interleaved_seconds(
    contestants: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Wall times of each contestant in seconds, one a repeat.

    They take turns (a, b, a, b, ...), so that a machine which slows down for a while slows all.

    Args:
        contestants: name -> one repeat of the work, warm, which returns when it is done.
        repeats: how often each is called.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, work in contestants.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return seconds
