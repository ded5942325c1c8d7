"""The cycles of a program that XLA compiled for a TPU, by its own estimates.

XLA writes `estimated_cycles` beside every fusion. Copies, collectives and Pallas kernels have none.
"""

from __future__ import annotations

import re

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_UNKNOWN = 2**62  # XLA's estimate where it has none


def estimated_cycles(text: str) -> int:
    """The sum of all estimates of `compiled.as_text()`, loops times their trip counts.

    Of the branches of a conditional, the longest counts.

    Raises:
        ValueError: the trip count of a loop is unknown.
    """
    bodies, entry = computations(text)

    def cycles_of(computation: str) -> int:
        return sum(map(cycles_of_line, bodies[computation]))

    def cycles_of_line(line: str) -> int:
        if re.search(r" while\(", line):
            return trips(line, bodies) * cycles_of(_called(line, "body"))
        if re.search(r" conditional\(", line):
            return max(map(cycles_of, _branches(line)))
        if re.search(r" call\(", line):
            return cycles_of(_called(line, "to_apply"))
        match = _ESTIMATE.search(line)
        return int(match[1]) if match and int(match[1]) < _UNKNOWN else 0

    return cycles_of(entry)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation of an HLO text, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name and line.startswith("  "):
            bodies[name].append(line)
    return bodies, entry


def _called(line: str, role: str) -> str:
    match = re.search(rf"{role}=%([\w.\-]+)", line)
    assert match is not None
    return match[1]


def _branches(line: str) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", line)
    if match:
        return match[1].replace("%", "").split(", ")
    return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", line)


def trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often the body of a loop runs: XLA says so, or the condition compares with a constant."""
    match = _TRIPS.search(line)
    if match:
        return int(match[1])
    condition = bodies[_called(line, "condition")]
    limits = [int(n) for inner in condition for n in re.findall(r"constant\((\d+)\)", inner)]
    if not limits:
        raise ValueError(f"the trip count of a loop is unknown: {line.strip()[:200]}")
    return max(limits)
