"""What every benchmark shares: options, measuring time and memory, and the report."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from command_line import ScoreNames

from attention_jax.scores import SCORES, get_score

JSON = dict[str, Any]
FOUR_SCORES = ("additive", "dot", "general", "scaled")  # of the literature; the default
INSTALL = ".venv/bin/pip install -e '.[bench]'"
SHRUNK = "lengths were divided, so these numbers are only a trial"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of all benchmarks, with their defaults.

    Attributes:
        scores: the scores of the training benchmarks.
        works: the works of the attention benchmark: names or patterns such as "additive*"; all
            works if empty.
        implementation: our implementation in the timed works; None for the one that `attention`
            chooses.
        shrink: divides the lengths of the attention, local and decoding benchmarks, for a trial
            that takes seconds.
        repeats: number of timed repeats; the median counts.
        steps: optimiser steps (for every seed) in one repeat of a training benchmark.
        seeds: number of our runs trained at once.
    """

    scores: ScoreNames = FOUR_SCORES
    works: tuple[str, ...] = ()
    implementation: str | None = None
    shrink: int = 1
    repeats: int = 5
    steps: int = 100
    seeds: int = 5

    def __post_init__(self) -> None:
        if not self.scores:
            raise ValueError(f"scores must name at least one of {', '.join(SCORES)}; got none")
        for score in self.scores:
            get_score(score)
        for name in ("shrink", "repeats", "steps", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


class Report(NamedTuple):
    """The result of a benchmark: one table.

    The table shows a dash for an entry that a row lacks, or that is None. It groups rows whose
    `section` entries are equal, and shows these entries once.
    """

    name: str
    title: str
    columns: dict[str, tuple[str, str]]  # heading -> (entry of a row, its format specification)
    rows: list[JSON]
    settings: JSON  # the same for all rows
    notes: list[str]  # lines under the table
    section: tuple[str, ...] = ("score",)

    def as_json(self) -> JSON:
        """The measurements, without the layout of the table."""
        return {key: getattr(self, key) for key in ("title", "rows", "settings", "notes")}


class Benchmark(NamedTuple):
    """The two functions that scripts/benchmark.py calls."""

    check: Callable[[Options], None]  # raises ValueError for options that `run` cannot serve
    run: Callable[[Options], Iterable[Report]]  # may yield a report before measuring the next


class Compiled(NamedTuple):
    """A compiled program and its cost."""

    call: Callable[..., Any]
    compile_seconds: float
    temporary_mib: float  # peak, in addition to arguments and results
    needed_bytes: int  # including arguments and results


def compile_cold(function: Callable, *arguments: Any) -> Compiled:
    """Traces and compiles as a new process would: JAX's caches are cleared first.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: its arguments, or a `jax.ShapeDtypeStruct` in place of each array.
    """
    jax.clear_caches()
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all report it
    temporary = memory.temp_size_in_bytes
    needed = temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Compiled(compiled, seconds, temporary / 2**20, needed)


def free_bytes() -> int:
    """The memory that a program can still allocate on JAX's default device."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo") as lines:
            entries = dict(line.split(":", 1) for line in lines)
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: the whole memory is the best estimate
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def interleaved_seconds(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    at_most: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """The wall times of each contestant in seconds, one per turn.

    Contestants take turns (a, b, a, b, ...), so that a machine which slows down for a while slows
    all of them. A turn calls the contestant for half a second, and the median of all calls except
    the first counts. The first call is slowed by the contestant before it: freed gigabytes are
    faulted in again (100 ms of work took 180 ms), caches are cold, threads sleep.

    Args:
        contestants: name -> a function that does one repeat of the work; already warm.
        repeats: number of turns.
        at_most: name -> a smaller number of turns.
    """
    at_most = at_most or {}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name, work in contestants.items():
            if repeat >= at_most.get(name, repeats):
                continue
            turn = [_seconds(work)]
            while sum(turn) < _TURN_SECONDS:
                turn.append(_seconds(work))
            seconds[name].append(statistics.median(turn[1:] or turn))
    return seconds


_TURN_SECONDS = 0.5


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_progress(message: str) -> None:
    """Prints a line to standard error, so that it does not mix with the tables."""
    print(message, file=sys.stderr, flush=True)
