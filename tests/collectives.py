"""The collectives of a compiled program, and whether they are inside a loop."""

import math
import re
from typing import NamedTuple

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"


class Sent(NamedTuple):
    """One collective; `numbers` counts the entries of its arrays."""

    kind: str
    dtypes: frozenset[str]
    numbers: int
    in_loop: bool


def collectives(compiled) -> list[Sent]:
    """Returns all collectives of a compiled program.

    A TPU's reduce-scatter is a fusion "all-reduce-scatter" of an all-reduce and a slice.
    """
    computations, name = {}, ""
    for line in compiled.as_text().splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = head[1]
        computations.setdefault(name, []).append(line)
    text = {name: "\n".join(lines) for name, lines in computations.items()}
    looped = set()
    called = set(re.findall(r"(?:body|condition)=%?([\w.\-]+)", "\n".join(text.values())))
    while called:
        looped |= called
        names = re.findall(r"%([\w.\-]+)", "\n".join(text.get(name, "") for name in called))
        called = (set(names) & set(text)) - looped
    found = []
    for name, lines in computations.items():
        for line in lines:
            if sent := re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line):
                arrays = re.findall(r"(\w+)\[([\d,]*)\]", sent[1])
                sizes = [math.prod(int(n) for n in shape.split(",") if n) for _, shape in arrays]
                dtypes = frozenset(dtype for dtype, _ in arrays)
                scattered = name.startswith("all-reduce-scatter")
                kind = "reduce-scatter" if scattered else sent[2]
                found.append(Sent(kind, dtypes, sum(sizes), name in looped))
    return found
