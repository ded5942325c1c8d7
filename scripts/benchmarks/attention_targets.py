"""The targets of the attention benchmark; each is evaluated from the benchmark's rows."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.attention_speed import OURS
from benchmarks.attention_works import OWN
from benchmarks.measure import FOUR_SCORES, JSON
from benchmarks.targets import Quantity, Rows, Target


def targets_met(rows: Rows) -> list[JSON]:
    """One row for each target, from the rows of all works and programs."""
    return [target.row(rows) for target in (*_timed(), *_compiled())]


# --- quantities ---


def _peer_over_ours(work: str, peer: str) -> Quantity:
    return lambda rows: _entry(rows, "times_ours", work=work, contestant=peer)


def _ours_over(work: str, peer: str) -> Quantity:
    def ratio(rows: Rows) -> float | None:
        times = _peer_over_ours(work, peer)(rows)
        return times and 1 / times

    return ratio


def _mib(program: str) -> Quantity:
    return lambda rows: _entry(rows, "temporary_mib", work=program, length=16384)


def _growth(program: str) -> Quantity:
    return lambda rows: _entry(rows, "times_shorter", work=program, length=16384)


def _compile_seconds(score: str) -> Quantity:
    """The longest compilation of our forward and backward pass, the reference excluded."""

    def counts(row: JSON) -> bool:
        timed = row.get("contestant") == OURS and row["direction"] == "forward + backward"
        only_compiled = row.get("implementation") != "reference" and row["direction"] == "grad"
        return row["score"] == score and (timed or only_compiled)

    def longest(rows: Rows) -> float | None:
        seconds = [row["compile_seconds"] for row in rows if counts(row) and "absent" not in row]
        return max(seconds, default=None)

    return longest


def _entry(rows: Rows, entry: str, **where: object) -> float | None:
    """The entry of the first row whose other entries equal `where`."""
    for row in rows:
        if all(row.get(name) == value for name, value in where.items()):
            return row.get(entry)
    return None


# --- the targets ---


def _timed() -> Iterator[Target]:
    scaled, scaled_grad = "scaled dot forward", "scaled dot forward + backward"
    additive, additive_grad = "additive forward", "additive forward + backward"
    for claim, work, peer, least in (
        (scaled, "scaled", "jax.nn", 4),
        (scaled, "scaled", "PyTorch SDPA", 1),
        (scaled_grad, "scaled-grad", "jax.nn", 2.5),
        (scaled_grad, "scaled-grad", "PyTorch SDPA", 1 / 1.2),
        (additive, "additive", "naive JAX", 20),
        (additive, "additive", "Keras", 20),
        (additive_grad, "additive-grad", "naive JAX", 15),
        ("a user's own score, forward + backward", "own-distance", "ours, reference", 1),
    ):
        yield Target(
            claim, f"time of {peer} / ours", _peer_over_ours(work, peer), "at least", least
        )
    for claim, work, peer, most in (
        ("causal forward", "causal", "ours, not causal", 0.6),
        ("causal forward + backward", "causal-grad", "ours, not causal", 0.6),
        ("local window of 256, T=S=16384", "local-16k", "ours, half as long", 2.3),
        ("scaled dot jvp", "scaled-jvp", "ours, forward", 4),
        ("additive jvp", "additive-jvp", "ours, forward", 6),
        ("general forward", "general", "ours, scaled dot", 1.15),
        ("general forward + backward", "general-grad", "ours, scaled dot", 1.15),
        *(
            (f"small problem, {name}", f"small-{name}", "ours, reference", 1.05)
            for name in FOUR_SCORES
        ),
    ):
        yield Target(claim, f"our time / {peer}", _ours_over(work, peer), "at most", most)


def _compiled() -> Iterator[Target]:
    for score in ("scaled", "additive"):
        program = f"memory-tiled-{score}-grad"
        claim = f"{score} forward + backward, T=S=16384"
        yield Target(claim, "temporary MiB", _mib(program), "at most", 128)
        yield Target(claim, _FROM_A_QUARTER, _growth(program), "at most", 4.5)
    for score, derivative, most in (
        ("scaled", "jvp", 64),
        ("scaled", "jvp-of-grad", 96),
        ("scaled", "grad-of-grad", 256),
        ("additive", "jvp", 160),
        ("additive", "jvp-of-grad", 320),
        ("additive", "grad-of-grad", 278),  # the figure before forward mode was rewritten
    ):
        program = f"memory-tiled-{score}-{derivative}"
        claim = f"tiled, {score}, {derivative}, T=S=16384"
        yield Target(claim, "temporary MiB", _mib(program), "at most", most)
    for derivative in ("jvp", "jvp-of-grad", "grad-of-grad"):
        program = f"memory-tiled-additive-{derivative}"
        claim = f"tiled, additive, {derivative}, T=S=16384"
        yield Target(claim, _FROM_A_QUARTER, _growth(program), "at most", 4.5)
    for score in (*FOUR_SCORES, OWN):
        claim = f"{score} forward + backward, any size"
        yield Target(claim, "compile seconds", _compile_seconds(score), "at most", 15)


_FROM_A_QUARTER = "temporary memory / that of T=S=4096"
