"""The attention benchmark: speed, memory, and targets for both.

Our attention and its peers take turns at every work in the same run, so that each ratio compares
medians measured side by side. A contestant that would not fit in memory is reported as absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator

from attention_jax.kernels import IMPLEMENTATIONS
from benchmarks import attention_memory, attention_speed
from benchmarks.attention_targets import targets_met
from benchmarks.attention_works import all_works, matching
from benchmarks.measure import JSON, SHRUNK, Options, Report

_OPTIONS = ("works", "implementation", "shrink", "repeats")  # the options that this benchmark reads
_PEER_PACKAGES = ("flax", "keras", "pykeops", "tokamax", "torch")

_SPEED_COLUMNS = {
    "work": ("work", ""),
    "direction": ("direction", ""),
    "shape, mask, type": ("setting", ""),
    "who": ("who", ""),
    "ms": ("milliseconds", ",.2f"),
    "/ ours": ("times_ours", ",.2f"),
    "temp. MiB": ("temporary_mib", ",.1f"),
    "compile, s": ("compile_seconds", ".1f"),
}
_MEMORY_COLUMNS = {
    "implementation": ("implementation", ""),
    "score": ("score", ""),
    "derivative": ("direction", ""),
    "shape": ("shape", ""),
    "temporary MiB": ("temporary_mib", ",.1f"),
    "/ a quarter of it": ("times_shorter", ".2f"),
    "compile, s": ("compile_seconds", ".1f"),
}
_TARGET_COLUMNS = {
    "claim": ("claim", ""),
    "number": ("what", ""),
    "target": ("target", ""),
    "measured": ("found", ".3g"),
    "met": ("met", ""),
}


def check(options: Options) -> None:
    """Raises ValueError for unknown works or an unknown implementation."""
    names = [*all_works(), *attention_memory.all_programs()]
    for pattern in options.works:
        if not matching(names, [pattern]):
            raise ValueError(f"works must be among {', '.join(names)}; got {pattern!r}")
    implementation = options.implementation
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}"
        )


def run(options: Options) -> Iterator[Report]:
    """Three tables, each yielded when it is complete: speed, memory, targets."""
    works, programs = all_works(), attention_memory.all_programs()
    chosen = [works[name].shrunk(options.shrink) for name in matching(works, options.works)]
    speed = attention_speed.rows_of(
        [dataclasses.replace(work, implementation=options.implementation) for work in chosen],
        options.repeats,
    )
    settings: JSON = {
        **{name: getattr(options, name) for name in _OPTIONS},
        "peers": _versions(),
    }
    yield Report(
        name="attention",
        title=f"Attention: median of {options.repeats} repeats",
        columns=_SPEED_COLUMNS,
        rows=[row | _shown(row) for row in speed],
        settings=settings,
        notes=[
            "/ ours: time divided by our time",
            "temp. MiB: peak temporary memory of programs compiled by XLA, without inputs and"
            " results",
            *_absences(speed, "contestant"),
        ],
        section=("work", "direction", "setting"),
    )
    memory = attention_memory.rows_of(
        (programs[name] for name in matching(programs, options.works)), options.shrink
    )
    yield Report(
        name="attention-memory",
        title="Derivatives by query, key, value and parameters: compiled, not run",
        columns=_MEMORY_COLUMNS,
        rows=memory,
        settings=settings,
        notes=_absences(memory, "implementation"),
        section=("implementation", "score", "direction"),
    )
    yield Report(
        name="attention-targets",
        title="Targets",
        columns=_TARGET_COLUMNS,
        rows=targets_met([*speed, *memory]),
        settings=settings,
        notes=[] if options.shrink == 1 else [SHRUNK],
        section=(),
    )


def _shown(row: JSON) -> JSON:
    """The row's setting and contestant in a few words."""
    unusual = [row["mask"]] * (row["mask"] != "none") + [row["dtype"]] * (row["dtype"] != "float32")
    name = who = row["contestant"]
    if "absent" in row:
        who = f"{name}: absent"
    elif "threads" in row:
        who = f"{name}, {row['threads']} thread" + ("s" if row["threads"] > 1 else "")
    elif row.get("implementation", name) not in name:
        who = f"{name} ({row['implementation']})"
    return {"setting": ", ".join([row["shape"], *unusual]), "who": who}


def _absences(rows: list[JSON], who: str) -> list[str]:
    """A line for each absent contestant and reason, with the works it is absent from."""
    works: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "absent" in row:
            works.setdefault((row[who], row["absent"]), []).append(row["work"])
    return [
        f"{name} is absent ({', '.join(dict.fromkeys(missing))}): {reason}"
        for (name, reason), missing in works.items()
    ]


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PEER_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
