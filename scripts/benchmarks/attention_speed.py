"""Milliseconds of our attention and of each available peer; the contestants take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

from benchmarks.attention_contestant import Contestant, ours
from benchmarks.attention_peers import PEERS
from benchmarks.attention_works import Work
from benchmarks.measure import JSON, interleaved_seconds, print_progress

OURS = "ours"
_SHORTEST_REPEAT = 0.05  # seconds: a faster contestant is called several times per repeat


def rows_of(works: Iterable[Work], repeats: int) -> list[JSON]:
    """For each work, a row for ours and a row for each of its peers, including absent peers.

    A row has "milliseconds" (per call, the median of all repeats); "times_ours", the ratio to our
    time; "temporary_mib" and "compile_seconds" of a program compiled by XLA; or "absent", with the
    reason.
    """
    return [
        row
        for work in works
        for row in race(work, {OURS: ours, **{name: PEERS[name] for name in work.peers}}, repeats)
    ]


def race(
    work: Work,
    prepare: Mapping[str, Callable[[Work], Contestant]],
    repeats: int,
    benchmark: str = "attention",
) -> list[JSON]:
    """A row for each contestant, in the order of `prepare`."""
    contestants: dict[str, Contestant] = {}
    absent = {}
    for name, prepare_contestant in prepare.items():
        try:
            contestants[name] = prepare_contestant(work)
        except LookupError as error:
            absent[name] = str(error)
    calls = {name: _calls_in_a_repeat(contestant) for name, contestant in contestants.items()}
    seconds = interleaved_seconds(
        {name: _repeated(contestants[name].call, calls[name]) for name in contestants},
        repeats * work.times_repeats,
        {name: c.most_repeats for name, c in contestants.items() if c.most_repeats},
    )
    milliseconds = {
        name: 1000 * statistics.median(seconds[name]) / calls[name] for name in contestants
    }
    summary = ", ".join(f"{name} {value:,.1f}" for name, value in milliseconds.items())
    print_progress(f"{benchmark}, {work.name}: milliseconds of {summary}")
    rows: list[JSON] = []
    for name in prepare:
        row = work.described() | {"contestant": name}
        if name in absent:
            rows.append(row | {"absent": absent[name]})
            continue
        times = milliseconds[name] / milliseconds[OURS] if OURS in milliseconds else None
        rows.append(
            row
            | contestants[name].about
            | {
                "milliseconds": milliseconds[name],
                "times_ours": times,
                "repeat_seconds": seconds[name],
                "calls_in_a_repeat": calls[name],
            }
        )
    return rows


def _calls_in_a_repeat(contestant: Contestant) -> int:
    """Warms the contestant up, and returns how many calls fill the shortest repeat."""
    start = time.perf_counter()
    contestant.call()
    if time.perf_counter() - start > 10 * _SHORTEST_REPEAT:  # slow enough, even when warm
        return 1
    start = time.perf_counter()
    contestant.call()
    return max(1, round(_SHORTEST_REPEAT / (time.perf_counter() - start)))


def _repeated(call: Callable[[], object], calls: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(calls):
            call()

    return repeat
