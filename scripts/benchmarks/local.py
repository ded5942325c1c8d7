"""Local against global attention with the same score, forward and backward.

Luong's local attention reads 2 D + 1 keys around a center; global attention reads all keys. Both
get the same query, key and value. Both compute the gradients of these and of the score's
parameters; local attention with a Gaussian (local-p) also computes the gradient of the centers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from attention_jax.functional.centers import monotonic_centers
from attention_jax.functional.local import local_attention
from benchmarks.attention_contestant import Contestant, jax_contestant, ours
from benchmarks.attention_speed import OURS, race
from benchmarks.attention_works import Tree, Work
from benchmarks.measure import JSON, SHRUNK, Options, Report
from benchmarks.targets import with_target

_GLOBAL = "global"
_RADIUS = 64

_COLUMNS = {
    "attention": ("attention", ""),
    "score": ("score", ""),
    "shape": ("shape", ""),
    "local, ms": ("milliseconds", ",.2f"),
    "global, ms": ("global_milliseconds", ",.2f"),
    "global / local": ("times_ours", ",.2f"),
    "local, temp. MiB": ("temporary_mib", ",.1f"),
    "global, temp. MiB": ("global_temporary_mib", ",.1f"),
    "target": ("target", ""),
    "met": ("met", ""),
}


@dataclasses.dataclass(frozen=True)
class Windows:
    """A kind of local attention; it makes one row.

    Attributes:
        attention: its name in the table.
        work: the work that local and global attention do.
        gaussian: damp weights by a Gaussian of standard deviation D / 2, as local-p does.
        target: the least ratio of global attention's time to ours; None for no target.
    """

    attention: str
    work: Work
    gaussian: bool = False
    target: float | None = None


def _rows() -> list[Windows]:
    scaled = Work("local-m", "scaled", 8192, backward=True)
    with_gaussian = dataclasses.replace(scaled, name="local-p")
    additive = dataclasses.replace(scaled, name="local-additive", score="additive", hidden_dim=64)
    return [
        Windows("local-m", scaled, target=5),
        Windows("local-p (Gaussian)", with_gaussian, gaussian=True),
        Windows("local-m", additive),
    ]


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> list[Report]:
    """Times every kind of local attention and global attention, which take turns."""
    radius = max(1, _RADIUS // options.shrink)
    rows = []
    for windows in _rows():
        work = windows.work.shrunk(options.shrink)
        contestants = {OURS: _local(radius, windows.gaussian), _GLOBAL: ours}
        local_row, global_row = race(work, contestants, options.repeats, benchmark="local")
        row: JSON = local_row | {
            "attention": windows.attention,
            "radius": radius,
            "times_ours": global_row["times_ours"],
            **{f"global_{name}": global_row[name] for name in _GLOBAL_ENTRIES},
        }
        rows.append(with_target(row, "times_ours", windows.target))
    report = Report(
        name="local",
        title=f"Windows of {2 * radius} (radius {radius}) or all keys, forward + backward:"
        f" median of {options.repeats} repeats",
        columns=_COLUMNS,
        rows=rows,
        settings={"repeats": options.repeats, "shrink": options.shrink, "radius": radius},
        notes=[
            "global / local: time of attention without a mask, divided by ours",
            *[SHRUNK] * (options.shrink > 1),
        ],
        section=(),
    )
    return [report]


_GLOBAL_ENTRIES = ("implementation", "milliseconds", "temporary_mib", "repeat_seconds")


def _local(radius: int, gaussian: bool) -> Callable[[Work], Contestant]:
    def contestant(work: Work) -> Contestant:
        inputs, _ = work.arrays()
        centers = monotonic_centers(work.length)
        if gaussian:  # the Gaussian is differentiable in its centers
            inputs["centers"] = np.asarray(centers, np.float32)
        attend = functools.partial(
            _attend, work, centers, radius=radius, sigma=radius / 2 if gaussian else None
        )
        return jax_contestant(work, attend, inputs=inputs)

    return contestant


def _attend(work: Work, centers: jax.Array, inputs: Tree, **window: float | None) -> jax.Array:
    arguments = {"centers": centers, **inputs, **window}
    return local_attention(**arguments, score=work.score_object())
