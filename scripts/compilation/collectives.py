"""What devices send each other in a program that XLA compiled, from the program's text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from compilation.xla_cycles import computations, trips

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHAIN = re.compile(r"channel_id=\d+(?=.*chain_id=)")
_BYTES_OF_PRED = 1


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: one of `KINDS`.
        bytes: of the whole array that a group of devices gathers, sums or exchanges.
        devices: of a group.
        runs: how often it runs in one call of the program.
    """

    kind: str
    bytes: int
    devices: int
    runs: int = 1

    @property
    def sent_bytes(self) -> float:
        """What each device sends in one call, if the devices of a group form a ring."""
        part = (self.devices - 1) / self.devices
        times = {"all-reduce": 2 * part, "collective-permute": 1.0}.get(self.kind, part)
        return self.runs * times * self.bytes


def collectives(text: str) -> list[Collective]:
    """All collectives of `compiled.as_text()`.

    XLA for TPUs writes a reduce-scatter as a fusion "all-reduce-scatter" of an all-reduce and a
    slice; it counts as what it is. An asynchronous collective counts once, where it starts. One
    that XLA spreads over many fusions is written in each, with one channel and chain; it counts
    once.
    """
    bodies, entry = computations(text)
    header = re.search(r"num_partitions=(\d+)", text)
    partitions = int(header[1]) if header else 1
    runs = _runs(bodies, entry)
    chains: set[str] = set()
    found = []
    for name, lines in bodies.items():
        for line in lines:
            match = _COLLECTIVE.search(line)
            if match is None or not runs.get(name):
                continue
            if chain := _CHAIN.search(line):
                if chain[0] in chains:
                    continue
                chains.add(chain[0])
            kind, started = match[2], bool(match[3])
            devices = _group(line, partitions)
            size = _bytes(match[1])
            if name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            elif kind == "all-gather" and started:
                size = size * devices // (devices + 1)  # a start lists its inputs, one part each
            elif kind == "reduce-scatter":
                size = size * devices // (devices + 1) if started else size * devices
            elif kind == "collective-permute" and started:
                size //= 2  # a start lists its input and its output
            found.append(Collective(kind, size, devices, runs[name]))
    return found


def summary(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """By kind: how often collectives run, and the bytes of their arrays and those sent."""
    by_kind: dict[str, dict[str, int]] = {}
    for each in found:
        total = by_kind.setdefault(each.kind, {"count": 0, "bytes": 0, "sent_bytes": 0})
        total["count"] += each.runs
        total["bytes"] += each.runs * each.bytes
        total["sent_bytes"] += round(each.sent_bytes)
    return {kind: by_kind[kind] for kind in KINDS if kind in by_kind}


def _runs(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation runs in one call; all branches of a conditional count."""
    runs: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        runs[name] = runs.get(name, 0) + times
        for line in bodies[name]:
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            within = times * trips(line, bodies) if re.search(r" while\(", line) else times
            for other in called:
                if other in bodies:
                    visit(other, within)

    visit(entry, 1)
    return runs


def _group(line: str, partitions: int) -> int:
    """The devices that a collective joins, from one of the ways to write `replica_groups`.

    They are a list, the number of groups and of devices in each, or axes of a mesh.
    """
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {axis: int(size) for axis, size in re.findall(r"('\w+')=(\d+)", match[1])}
        return math.prod(sizes[axis] for axis in match[2].split(","))
    if "replica_groups=" in line and "replica_groups={}" not in line:
        raise ValueError(f"replica_groups is written in an unknown way: {line.strip()[:300]}")
    return partitions


def _bytes(arrays: str) -> int:
    """The bytes of the arrays in an HLO type; scalars u32 are what a start keeps for itself."""
    total = 0
    for kind, bits, shape in _ARRAY.findall(arrays):
        if kind == "u" and bits == "32" and not shape:
            continue
        numbers = math.prod(int(size) for size in shape.split(",") if size)
        total += numbers * (math.ceil(int(bits) / 8) if bits else _BYTES_OF_PRED)
    return total
