"""What the cases of one fault found out, and the line of the table that tells it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

# What a defect can be; the last is all that has no column of its own.
WRONG, UNCLEAR, TRACEBACK, OTHER = "wrong values", "unclear message", "traceback", "other"
KINDS = (WRONG, UNCLEAR, TRACEBACK, OTHER)
COLUMNS = ("fault", "times", "most steps lost", *KINDS, "how it ended", "seconds")


class Ended(NamedTuple):
    """How a command ended, or what stands for one."""

    status: int  # negative: the signal that killed it
    out: str
    err: str


class Result(NamedTuple):
    """What a run leaves behind; of two that are equal, every bit is."""

    values: dict[str, str]  # of each leaf of the last state, a hash of its bytes
    metrics: bytes  # metrics.jsonl


def hashes(state: Any) -> dict[str, str]:
    """SHA-256 of each leaf's bytes: not the digests that checkpoints themselves rely on."""
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@dataclasses.dataclass
class Findings:
    """Of all cases of one fault.

    Attributes:
        times: how often the fault was done.
        endings: how often which good or bad end came of it.
        lost: the most steps that were lost at once, counted in lines of metrics.jsonl.
        allowed: those that may be.
        defects: (kind, what happened), the case among it.
    """

    times: int = 0
    endings: Counter[str] = dataclasses.field(default_factory=Counter)
    lost: int = 0
    allowed: int = 0
    defects: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    case: str = ""  # the one that is under way

    def ended(self, how: str, *, times: int = 1) -> None:
        """Counts an end; `times` is 0 where it is one more thing to say of a fault counted."""
        self.times += times
        self.endings[how] += 1

    def defect(self, kind: str, what: str) -> None:
        self.defects.append((kind, f"{self.case}: {what}"))

    def expect(self, truth: bool, otherwise: str) -> None:
        if not truth:
            self.defect(OTHER, otherwise)

    def steps_lost(self, lost: int, *, allowed: int) -> None:
        self.lost, self.allowed = max(self.lost, lost), max(self.allowed, allowed)
        self.expect(0 <= lost <= allowed, f"lost {lost} steps of {allowed}")

    def same(self, found: Result, wanted: Result) -> None:
        """Whether a run ended with the bits of another."""
        different = [
            path for path in wanted.values if wanted.values[path] != found.values.get(path)
        ]
        if different or found.values.keys() != wanted.values.keys():
            self.defect(WRONG, f"other bits in {', '.join(different) or 'no leaf of before'}")
        if found.metrics != wanted.metrics:
            self.defect(WRONG, "other bytes in metrics.jsonl")

    def said(self, ended: Ended, *, status: int, line: str = "") -> None:
        """Whether a command exited so, and said one line that matches, or nothing if that is "".

        Args:
            ended: the command.
            status: its exit status.
            line: a regular expression for the whole of standard error.
        """
        everything = ended.out + ended.err
        if "Traceback (most recent" in everything:
            self.defect(TRACEBACK, everything[-1500:])
        elif not re.fullmatch(rf"{line}\n" if line else "", ended.err):
            self.defect(UNCLEAR, f"expected {line!r}; got {ended.err[-1500:]!r}")
        self.expect(
            ended.status == status, f"exit status {ended.status} for {status}: {ended.err[-300:]!r}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "times": self.times,
            "lost": self.lost,
            "allowed": self.allowed,
            "endings": dict(self.endings.most_common()),
            "defects": [{"kind": kind, "what": what} for kind, what in self.defects],
        }


def line(row: dict[str, Any]) -> str:
    """The line of the table for one fault."""
    counted = Counter(defect["kind"] for defect in row["defects"])
    lost = f"{row['lost']} of {row['allowed']}"
    endings = "; ".join(f"{how} {many}" for how, many in row["endings"].items())
    cells = (row["fault"], row["times"], lost, *(counted[kind] for kind in KINDS), endings)
    return f"| {' | '.join(map(str, cells))} | {row['seconds']:.0f} |"


def table(rows: list[dict[str, Any]]) -> str:
    """The whole table, as Markdown."""
    head = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
    return "\n".join([head, *map(line, rows)])
