"""The attention benchmark: times of all works, and memory of all derivatives.

Our attention and its peers take turns at every work in the same run. The programs whose memory is
measured are compiled and not run.
"""

from __future__ import annotations

import functools

import jax

from attention_jax.runs.progress import say
from benchmarks import measure
from benchmarks.contestants import our_attention, ours, program
from benchmarks.peers import PEERS
from benchmarks.tables import entry
from benchmarks.works import GRAD, Work, works

_LENGTHS = (4096, 16384)  # of the programs that are compiled only


def _race(work: Work, repeats: int) -> list[measure.JSON]:
    makers = {"ours": ours, **{name: PEERS[name] for name in work.peers}}
    prepare = {name: functools.partial(make, work) for name, make in makers.items()}
    return measure.race(work.described(), prepare, repeats)


TIMES = measure.Benchmark(
    "attention",
    lambda options: {
        name: functools.partial(_race, work.shrunk(options.shrink), options.repeats)
        for name, work in works().items()
    },
)


# --- memory ---


def _memory_of(work: Work, shrink: int) -> list[measure.JSON]:
    """A row per length: temporary memory, and its ratio to that of a quarter of the length."""
    rows: list[measure.JSON] = []
    for length in _LENGTHS:
        sized = work.but(length=length).shrunk(shrink)
        say(f"{work.name}: compiling for length {sized.length}", error=True)
        inputs, cotangent = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sized.arrays()
        )
        attend = program(sized, our_attention(sized))
        about = measure.compile_cold(attend, inputs, cotangent, inputs).about
        if rows:
            about["times_shorter"] = about["temporary_mib"] / rows[0]["temporary_mib"]
        who = "ours" if work.implementation == "tiled" else f"ours, {work.implementation}"
        rows.append({**sized.described(), "length": length, "contestant": who, **about})
    return rows


def _programs(options: measure.Options) -> measure.Cases:
    grad = [Work(f"memory-{score}-grad", score, 0, GRAD) for score in measure.FOUR_SCORES]
    grad[0] = grad[0].but(hidden_dim=128)
    found = [work.but(name=f"{work.name}-reference", implementation="reference") for work in grad]
    found += [work.but(implementation="tiled") for work in grad]
    for score, hidden_dim in {"scaled": None, "additive": 64}.items():
        for direction in ("jvp", "jvp of grad", "grad of grad"):
            name = f"memory-{score}-{direction.replace(' ', '-')}"
            work = Work(name, score, 0, direction, hidden_dim=hidden_dim)
            found.append(work.but(implementation="tiled"))
    return {work.name: functools.partial(_memory_of, work, options.shrink) for work in found}


MEMORY = measure.Benchmark(
    "attention_memory",
    _programs,
    {
        "case": entry("work"),
        "work": entry("what"),
        "MiB": entry("temporary_mib", ",.1f"),
        "MiB with T=S=16384": lambda rows: entry("temporary_mib", ",.1f")(rows[1:]),
        "ratio": lambda rows: entry("times_shorter", ".1f")(rows[1:]),
    },
)
