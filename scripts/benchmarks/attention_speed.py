"""Milliseconds of ours and of each peer that is there: the contestants of a work take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

from benchmarks.attention_peers import PEERS, Contestant, ours
from benchmarks.attention_works import Work
from benchmarks.measure import JSON, interleaved_seconds, say

OURS = "ours"
_SHORTEST_REPEAT = 0.05  # seconds: what takes less is called several times in a repeat


def rows_of(works: Iterable[Work], repeats: int) -> list[JSON]:
    """For each work a row of ours, then one of each of its peers, also of those that are absent.

    A row has "milliseconds" (a call, median of all repeats); "times_ours", how many times as long
    as ours it took; "temporary_mib" and "compile_seconds" of what XLA compiled; or "absent", with
    the reason.
    """
    return [
        row
        for work in works
        for row in race(work, {OURS: ours, **{name: PEERS[name] for name in work.peers}}, repeats)
    ]


def race(
    work: Work,
    prepared_by: Mapping[str, Callable[[Work], Contestant]],
    repeats: int,
    benchmark: str = "attention",
) -> list[JSON]:
    """A row for each contestant, in the order given."""
    contestants: dict[str, Contestant] = {}
    absent = {}
    for name, prepare in prepared_by.items():
        try:
            contestants[name] = prepare(work)
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
    told = ", ".join(f"{name} {value:,.1f}" for name, value in milliseconds.items())
    say(f"{benchmark}, {work.name}: milliseconds of {told}")
    rows: list[JSON] = []
    for name in prepared_by:
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
    """Warms it up, and finds how often it must be called to take long enough."""
    began = time.perf_counter()
    contestant.call()
    if time.perf_counter() - began > 10 * _SHORTEST_REPEAT:  # no need to try again without warm-up
        return 1
    began = time.perf_counter()
    contestant.call()
    return max(1, round(_SHORTEST_REPEAT / (time.perf_counter() - began)))


def _repeated(call: Callable[[], object], calls: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(calls):
            call()

    return repeat
