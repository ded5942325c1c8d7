"""What every benchmark shares: options, contestants that take turns, and the noise of their times.

A benchmark is a list of cases. A case measures one thing and returns its rows, one per contestant.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from command_line import ScoreNames

from attention_jax.core.checks import check_integer
from attention_jax.runs.progress import say
from attention_jax.scores import SCORES, get_score
from benchmarks.tables import Columns, entry, with_noise

JSON = dict[str, Any]
Cases = Mapping[str, Callable[[], list[JSON]]]  # each measures, and returns its rows
FOUR_SCORES = ("additive", "dot", "general", "scaled")  # of the literature; the default

_TURN_SECONDS = 0.5
_SLOW_SECONDS, _SLOW_TURNS = 2.0, 3  # a contestant whose call takes longer has fewer turns
_MEMORY_SHARE = 0.6  # that a contestant may take


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of all benchmarks, with their defaults.

    Attributes:
        scores: the scores of the training benchmarks.
        works: names of cases or patterns such as "additive*"; all cases if empty.
        shrink: divides lengths and steps, for a trial that takes seconds.
        repeats: number of turns of each contestant. The median counts; the quartiles are its noise.
    """

    scores: ScoreNames = FOUR_SCORES
    works: tuple[str, ...] = ()
    shrink: int = 1
    repeats: int = 7

    def __post_init__(self) -> None:
        if not self.scores:
            raise ValueError(f"scores must name at least one of {', '.join(SCORES)}; got none")
        for score in self.scores:
            get_score(score)
        for name in ("shrink", "repeats"):
            check_integer(name, getattr(self, name))

    def chosen(self, cases: Mapping[str, Cases]) -> dict[str, Cases]:
        """The cases of each benchmark that match one of `works`; all if there are none."""
        names = [name for of_benchmark in cases.values() for name in of_benchmark]
        kept: set[str] = set()
        for pattern in self.works or ("*",):
            if not (matching := fnmatch.filter(names, pattern)):
                raise ValueError(f"works must be among {', '.join(names)}; got {pattern!r}")
            kept.update(matching)
        return {
            benchmark: {name: case for name, case in of_benchmark.items() if name in kept}
            for benchmark, of_benchmark in cases.items()
        }


class Contestant(NamedTuple):
    """A computation: a call that returns when its results are ready, and facts about it."""

    call: Callable[[], Any]
    about: JSON


Prepare = Callable[[], Contestant]  # raises LookupError with the reason if it is absent


def race(work: JSON, prepare: Mapping[str, Prepare], repeats: int) -> list[JSON]:
    """Times contestants that take turns; returns a row for each.

    A row has the entries of `work`; "contestant"; "milliseconds", the median of its turns, and
    "quartiles" of them; "turns", all of them; and what is known about the contestant. An absent
    contestant has "absent", the reason, instead.

    Args:
        work: what is measured; "work" is its name, and "what" describes it. With "count" and
            "unit", what is done in a call, the rows have a "rate" per second.
        prepare: the contestants by name. The times of the first are what others are compared with.
        repeats: number of turns.
    """
    ready: dict[str, Contestant] = {}
    rows: dict[str, JSON] = {}
    for name, prepare_contestant in prepare.items():
        rows[name] = {**work, "contestant": name}
        try:
            ready[name] = prepare_contestant()
        except LookupError as error:
            rows[name]["absent"] = str(error)
            say(f"{work['work']}: {name} is absent: {error}", error=True)
    turns = interleaved({name: contestant.call for name, contestant in ready.items()}, repeats)
    for name, milliseconds in turns.items():
        low, median, high = quartiles(milliseconds)
        times = {"milliseconds": median, "quartiles": [low, high], "turns": milliseconds}
        rate = {"rate": 1000 * work["count"] / median} if "count" in work else {}
        rows[name] |= times | rate | ready[name].about
    summary = ", ".join(f"{name} {quartiles(times)[1]:,.4g}" for name, times in turns.items())
    say(f"{work['work']}: milliseconds of {summary}", error=True)
    return list(rows.values())


def interleaved(
    calls: Mapping[str, Callable[[], object]], repeats: int, turn_seconds: float | None = None
) -> dict[str, list[float]]:
    """The milliseconds of each contestant in each of its turns, after a call to warm up.

    Contestants take turns (a, b, b, a, ...), so that a machine which slows down for a while slows
    all of them, and none always follows the same other one. A turn calls the contestant for
    `turn_seconds`, by default half a second, and is the median of all calls except the first. The
    first call is slowed by the contestant before it: freed gigabytes are faulted in again (100 ms
    of work took 180 ms), caches are cold, threads sleep.
    """
    turn_seconds = _TURN_SECONDS if turn_seconds is None else turn_seconds
    slow = {name for name, call in calls.items() if _seconds(call) > _SLOW_SECONDS}
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in [*calls] if repeat % 2 == 0 else [*calls][::-1]:
            if name in slow and repeat >= _SLOW_TURNS:
                continue
            end, seconds = time.perf_counter() + turn_seconds, [_seconds(calls[name])]
            while time.perf_counter() < end:
                seconds.append(_seconds(calls[name]))
            turns[name].append(significant(1000 * np.median(seconds[1:] or seconds)))
    return turns


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    low, median, high = np.percentile(numbers, (25, 50, 75))
    return significant(low), significant(median), significant(high)


def significant(number: float) -> float:
    """A number with five significant digits, for result files."""
    return float(f"{number:.5g}")


def ratio(over: JSON, under: JSON) -> tuple[float, float, float] | None:
    """Quartiles of one contestant's time divided by another's in the same turn, and the median."""
    turns = zip(over.get("turns", ()), under.get("turns", ()), strict=False)
    ratios = [a / b for a, b in turns]
    return quartiles(ratios) if ratios else None


# --- tables ---


def _first(rows: list[JSON]) -> str:
    """The contestant that the others are compared with: its time, with noise, and its rate."""
    row = rows[0]
    if "turns" not in row:
        return f"{row['contestant']}: absent"
    rate = f", {row['rate']:,.0f} {row['unit']}/s" if "rate" in row else ""
    return f"{row['contestant']}: {with_noise(quartiles(row['turns']))} ms{rate}"


def _others(rows: list[JSON]) -> str:
    """The other contestants' times divided by the first one's, and the noise of these ratios."""
    ratios = ((row["contestant"], ratio(row, rows[0])) for row in rows[1:])
    return " · ".join(f"{name} {with_noise(found)}" for name, found in ratios if found) or "-"


RACES: Columns = {
    "case": entry("work"),
    "work": entry("what"),
    "time": _first,
    "others, times as long": _others,
}


class Benchmark(NamedTuple):
    """A benchmark: the name of its rows in result files, its cases by name, and its table."""

    name: str
    cases: Callable[[Options], Cases]
    columns: Columns = RACES


# --- programs ---


class Compiled(NamedTuple):
    """A compiled program and its cost."""

    call: Callable[..., Any]
    about: JSON  # "compile_seconds"; "temporary_mib", its peak beside arguments and results
    needed_bytes: int  # including arguments and results


def compile_cold(function: Callable, *arguments: Any) -> Compiled:
    """Traces and compiles as a new process would: JAX's caches are cleared first.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: its arguments, or a `jax.ShapeDtypeStruct` in place of each array.
    """
    jax.clear_caches()
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    about: JSON = {"device": jax.default_backend()}
    about["compile_seconds"] = significant(time.perf_counter() - start)
    memory = program.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all report it
    about["temporary_mib"] = significant(memory.temp_size_in_bytes / 2**20)
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Compiled(program, about, memory.temp_size_in_bytes + others)


def compiled(function: Callable, *arguments: Any, **about: Any) -> Prepare:
    """Prepares a contestant that calls a function of arrays, compiled, with these arguments."""

    def prepare() -> Contestant:
        program = compile_cold(function, *arguments)
        needed, memory = program.needed_bytes / 2**30, memory_bytes() / 2**30
        if needed > _MEMORY_SHARE * memory:
            raise LookupError(f"it needs {needed:.1f} GiB, and the device has {memory:.1f} GiB")
        call = functools.partial(program.call, *arguments)
        return Contestant(lambda: jax.block_until_ready(call()), program.about | about)

    return prepare


def memory_bytes() -> int:
    """The memory of JAX's default device."""
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has none
    return stats.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def import_peer(module: str) -> Any:
    """The module; a LookupError that says how to install it if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LookupError(f"{reason}; .venv/bin/pip install -e '.[bench]'") from error
