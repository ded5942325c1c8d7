"""How fast? The library beside its peers: ceilings, scaled dot, additive, other scores, tiles.

Programs compile in several threads at once, and are then timed in turns, alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import interop
from attention_jax.kernels import IMPLEMENTATIONS
from benchmarks import measure
from benchmarks.measure import JSON, Contestant, Race
from benchmarks.peers import in_pytorch, jax_nn, ours
from benchmarks.works import Work
from device_checks.record import NOT_MEASURED, Record

Makers = Mapping[str, Callable[[Work], Contestant]]

_COMPILING = 0.6  # of a part's time, at most
_TURNS, _TURN_SECONDS = 4, 0.06
_AT_ONCE = 0.015  # seconds of the calls that are started before the last one is waited for
# B, N query heads, K heads of keys and values, T = S, head size. A rehearsal takes every second.
_SCALED = (
    *((8, 16, 16, 2048, 64), (8, 16, 16, 2048, 128), (8, 16, 4, 2048, 128)),
    *((4, 16, 16, 8192, 64), (8, 8, 8, 2048, 256)),
)
_ADDITIVE = ((8, 2048, 128), (8, 2048, 64), (1, 8192, 128), (1, 8192, 64))  # B, T = S, A
_LONGEST_OF_XLA = 2048  # of jax.nn without cuDNN, which stores the logits
_USER = "device_checks.right:manhattan"


def check(part: str, record: Record) -> None:
    """Compiles all programs of a part, the first races first, then times race after race."""
    races = {race.about["work"]: race for race in RACES[part](record.shrink)}
    last = (1 - _COMPILING) * record.left()
    missing = [
        (work, name)
        for work, race in races.items()
        for name in race.contestants
        if not record.has(part, work, name)
    ]

    def prepare(work: str, name: str) -> tuple[Contestant | None, JSON]:
        if record.left() <= last:
            return None, NOT_MEASURED
        prepared = measure.attempt(races[work].contestants[name])
        record.note(f"{part}: compiled {work}, {name}")
        return prepared

    ready = dict(zip(missing, record.in_threads(prepare, missing), strict=True))
    rates = [row.get("tflops", 0.0) for row in record.rows("machine")]
    for work, race in races.items():
        mine = {name: ready.pop((work, name)) for name in race.contestants if (work, name) in ready}
        if record.left() <= 0:
            mine = dict.fromkeys(mine, (None, NOT_MEASURED))
        for row in measure.timed(race, mine, _TURNS, _TURN_SECONDS, _AT_ONCE):
            if "tflops" in row and any(rates):
                row["percent_of_product"] = measure.significant(100 * row["tflops"] / max(rates))
            record.add(part, **row)


# --- races ---


def _ceilings(shrink: int) -> Iterator[Race]:
    """The rate of a large matrix product, and the bandwidth of a copy."""
    size = 8192 // shrink
    matrix = jax.random.normal(jax.random.key(0), (size, size), "bfloat16")
    array = jnp.ones((256 // shrink, 2**20))
    product = {"bfloat16": functools.partial(measure.compiled, jnp.matmul, matrix, matrix)}
    yield Race({"work": "matrix product"}, product, {"tflops": 2e-12 * size**3})
    copy = {"float32": functools.partial(measure.compiled, lambda x: x + 1, array)}
    yield Race({"work": "copy"}, copy, {"gigabytes_per_second": 8e-9 * array.size})


def _both(work: Work, makers: Makers, flop: float = 0.0) -> Iterator[Race]:
    """The races of the forward pass, and of the forward and the backward pass."""
    for direction, share in ((measure.FORWARD, 1), (measure.GRAD, 3.5)):
        directed = work.but(direction=direction, dtype="bfloat16")
        contestants = {name: functools.partial(make, directed) for name, make in makers.items()}
        about = {"work": f"{work.name}, {direction}"}
        yield Race(about, contestants, {"tflops": 1e-12 * share * flop})


def _ours(*names: str, make: Callable[..., Contestant] = ours) -> Makers:
    """The library with the implementation that it chooses, and with each by name."""
    named = {f"ours, {name}": functools.partial(make, implementation=name) for name in names}
    return {"ours": make, **named}


def _scaled(shrink: int) -> Iterator[Race]:
    """Multi-head attention as a model calls it: all arrays are [B, T, N, H]."""
    for b, n, k, t, h in _SCALED[:: 1 if shrink == 1 else 2]:
        size = f"scaled, B{b} N{n} K{k} T{t} H{h}"
        if shrink > 1:
            b, n, k, t = 1, 4, 4 * k // n, t // shrink
        theirs = ["cudnn"] * (jax.default_backend() == "gpu") + ["xla"] * (t <= _LONGEST_OF_XLA)
        makers: Makers = {
            **_ours("cudnn", make=functools.partial(jax_nn, module=interop)),
            **{f"jax.nn, {x}": functools.partial(jax_nn, implementation=x) for x in theirs},
            "PyTorch": in_pytorch("sdpa"),
        }
        work = Work(size, "scaled", t, batch=b, num_heads=n, num_key_heads=k, dim=h)
        flop = 4 * b * n * t * t * h
        yield from _both(work.but(name=f"{size}, causal", mask="causal"), makers, flop / 2)
        yield from _both(work, makers, flop)


def _additive(shrink: int) -> Iterator[Race]:
    """Additive attention, -|q - k|^2, and a user's -|q - k|."""
    for b, t, a in _ADDITIVE[:: 1 if shrink == 1 else 2]:
        makers = _ours(*IMPLEMENTATIONS)
        if a == 128:  # it takes many seconds to compile
            makers = {**makers, "PyTorch": in_pytorch("additive")}
        work = Work(f"additive, B{b} T{t} A{a}", "additive", t // shrink, dim=128, hidden_dim=a)
        yield from _both(work.but(batch=b if shrink == 1 else 1), makers)
    for name, score in {"l2": "l2", "user": _USER}.items():
        work = Work(f"{name}, B8 T2048 D64", score, 2048 // shrink, batch=8)
        yield from _both(work, _ours("tiled"))


def _tiles(shrink: int) -> Iterator[Race]:
    """Sizes of tiles, and one query for many keys, which is a step of decoding."""
    sizes = (512, 1024, 256, 2048, 128, 64) if shrink == 1 else (16, 64)
    step = Work("scaled, B16 T1 S65536 D64", "scaled", 1, batch=16, key_length=65536 // shrink)
    yield next(_both(step, _ours("reference", "tiled")))
    makers = {
        f"tiles of {x}": functools.partial(ours, implementation="tiled", tile=x) for x in sizes
    }
    for name, score in {"scaled": "scaled", "additive": "additive", "user": _USER}.items():
        batch = 16 if name == "scaled" else 1
        work = Work(f"{name}, B{batch} T4096 D64", score, 4096 // shrink, hidden_dim=64)
        yield from _both(work.but(batch=batch if shrink == 1 else 1), makers)


RACES: dict[str, Callable[[int], Any]] = {
    "machine": _ceilings,
    "scaled": _scaled,
    "additive": _additive,
    "tiles": _tiles,
}
