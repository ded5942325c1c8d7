"""What every benchmark shares: its options, how it takes time and memory, what it reports."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from attention_jax.scores import SCORES, get_score

JSON = dict[str, Any]
FOUR_SCORES = ("additive", "dot", "general", "scaled")  # those of the literature, by default


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose; every default stands here.

    Attributes:
        scores: of the training benchmarks: names, or "module:Name" for one of your own.
        works: of the attention benchmark: names or patterns such as "additive*"; all if none.
        implementation: ours in its timed works; None for what `attention` picks.
        shrink: divides the lengths of the attention, local and decoding benchmarks, for a trial
            of seconds.
        repeats: timed repeats; the median counts.
        steps: optimiser steps (of every seed) in one repeat of a training benchmark.
        seeds: runs of ours trained at once.
    """

    scores: tuple[str, ...] = FOUR_SCORES
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
    """What a benchmark found: one table.

    An entry that a row lacks, or that is None, is shown as a dash. Rows that agree in the entries
    `section` stand together, and show these once.
    """

    name: str
    title: str
    columns: dict[str, tuple[str, str]]  # heading -> (a row's entry, its format specification)
    rows: list[JSON]
    settings: JSON  # what was the same in all rows
    notes: list[str]  # lines under the table
    section: tuple[str, ...] = ("score",)

    def as_json(self) -> JSON:
        """What is worth keeping: not how it was shown."""
        return {key: getattr(self, key) for key in ("title", "rows", "settings", "notes")}


class Benchmark(NamedTuple):
    """What scripts/benchmark.py needs of one."""

    check: Callable[[Options], None]  # a ValueError for what `run` could not do
    run: Callable[[Options], Iterable[Report]]  # a report may come before the next is measured


class Compiled(NamedTuple):
    """A program and what it takes."""

    call: Callable[..., Any]
    compile_seconds: float
    temporary_mib: float  # at its peak, beside arguments and results
    needed_bytes: int  # arguments and results included


def compile_cold(function: Callable, *arguments: Any) -> Compiled:
    """Traces and compiles as a new process would, whatever was compiled before.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: as it takes them, or `jax.ShapeDtypeStruct` in place of arrays.
    """
    jax.clear_caches()
    began = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all tell
    temporary = memory.temp_size_in_bytes
    needed = temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Compiled(compiled, seconds, temporary / 2**20, needed)


def free_bytes() -> int:
    """Memory that a program could still take, on JAX's default device."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo") as lines:
            entries = dict(line.split(":", 1) for line in lines)
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: all of it, for want of something better
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def interleaved_seconds(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    at_most: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Wall times of each contestant in seconds, one a turn.

    They take turns (a, b, a, b, ...), so that a machine which slows down for a while slows all.
    A turn is as many calls as half a second takes, and the median of all but its first counts. For
    what ran before slows what runs next: memory given back in gigabytes has to be faulted in anew
    (100 ms of work took 180), caches are cold, threads asleep.

    Args:
        contestants: name -> one repeat of the work, warm, which returns when it is done.
        repeats: how many turns each has.
        at_most: fewer turns for those named.
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
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def say(message: str) -> None:
    """A line of progress, where it does not mix with tables."""
    print(message, file=sys.stderr, flush=True)
