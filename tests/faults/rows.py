"""The faults, each under the name that the table gives it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import NamedTuple

from . import damage, disk, settings, signals
from .damage import bit_flipped, data_file, deleted, garbage, metadata_file, truncated, zeroed
from .findings import OTHER, Findings
from .processes import Place


class Row(NamedTuple):
    """One kind of fault."""

    name: str
    case: Callable[[Place, random.Random, Findings], None]
    repeats: int  # in the whole table
    quick: bool = False  # without a process, in less than a second each


ROWS = [
    Row("kill -9 while training and saving", signals.killed, 2),
    Row("kill -9 while starting", signals.killed_at_the_start, 4),
    Row("SIGTERM or SIGINT", signals.asked_to_stop, 4),
    Row("a second signal", signals.asked_twice, 3),
    Row("newest step: a file truncated", damage.newest_step(data_file, truncated), 40, quick=True),
    Row("newest step: a file deleted", damage.newest_step(data_file, deleted), 40, quick=True),
    Row("newest step: one bit flipped", damage.newest_step(data_file, bit_flipped), 60, quick=True),
    Row(
        "newest step: metadata damaged",
        damage.newest_step(metadata_file, truncated, deleted, bit_flipped, zeroed, garbage),
        80,
        quick=True,
    ),
    Row("every step damaged", damage.every_step, 10, quick=True),
    Row("stray step folders and files", damage.stray, 40, quick=True),
    Row("a start that was cut off", damage.half_made, 14, quick=True),
    Row("metrics.jsonl cut off", damage.metrics_cut, 10, quick=True),
    Row("disk full", disk.full_disk, 4),
    Row("files limited (ulimit -f)", disk.limited_files, 3),
    Row("disk mounted read-only", disk.read_only_disk, 2),
    Row("write permission taken away", disk.taken_away, 2),
    Row("another configuration", settings.other_settings, 6),
    Row("other devices: 1, 8, 2", settings.other_devices, 1),
    Row("a second process", settings.second_process, 2),
    Row("two processes at once", settings.at_once, 1),
    Row("two threads at one instant", settings.at_the_same_instant, 200, quick=True),
]


def conduct(row: Row, place: Place, repeats: int, *, shown: bool = False) -> Findings:
    """Does the fault so many times."""
    found = Findings()
    for index in range(repeats):
        found.case = f"case {index}"
        try:
            row.case(place, random.Random(f"{row.name} {index}"), found)
        except disk.SkippedError as reason:
            found.ended(f"skipped: {reason}", times=0)
        except Exception as error:
            found.defect(OTHER, f"{type(error).__name__}: {error}")
        if shown:
            defects = f", {len(found.defects)} defects" if found.defects else ""
            print(f"{row.name}: {index + 1} of {repeats}{defects}", file=sys.stderr, flush=True)
    return found
