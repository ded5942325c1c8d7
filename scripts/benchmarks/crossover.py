"""The size from which tiles are faster: the source of `attention_jax/kernels/choice.py`."""

from __future__ import annotations

from benchmarks import attention_speed
from benchmarks.attention_works import OWN, Work
from benchmarks.measure import Options, Report

_BATCHES = (1, 64)
_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_MOST_PAIRS = 2**22
_SCORES = ("additive", "scaled", OWN)  # one for each kind that `choice.py` distinguishes

_COLUMNS = {
    "score": ("score", ""),
    "shape": ("shape", ""),
    "pairs": ("pairs", ",d"),
    "tiled, ms": ("milliseconds", ",.2f"),
    "reference / tiled": ("times_ours", ".2f"),
}


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> list[Report]:
    """Times forward + backward of "tiled" and "reference", which take turns at every size."""
    works = [
        Work(
            f"crossover-{score.replace(' ', '-')}-{batch}x{length}",
            score,
            length,
            backward=True,
            batch=batch,
            hidden_dim=64 if score == "additive" else None,
            implementation="tiled",
            peers=("ours, reference",),
        )
        for score in _SCORES
        for batch in _BATCHES
        for length in _LENGTHS
        if batch * length**2 <= _MOST_PAIRS
    ]
    rows = attention_speed.rows_of(works, options.repeats)
    merged = [
        tiled
        | {
            "pairs": work.batch * work.length**2,
            "reference_milliseconds": reference["milliseconds"],
            "times_ours": reference["times_ours"],
            "reference_repeat_seconds": reference["repeat_seconds"],
        }
        for work, tiled, reference in zip(works, rows[::2], rows[1::2], strict=True)
    ]
    report = Report(
        name="crossover",
        title=f"Tiled or materialised, forward + backward: median of {options.repeats} repeats",
        columns=_COLUMNS,
        rows=merged,
        settings={"repeats": options.repeats},
        notes=["reference / tiled: tiles are faster where it is above 1"],
    )
    return [report]
