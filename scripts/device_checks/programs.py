"""Programs that compile in several threads at once, and are then timed in turns, alone."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmarks.measure import import_peer, interleaved, quartiles, significant

from device_checks.record import JSON, NOT_MEASURED, Record, attempt

Function = Callable[..., jax.Array]  # of arrays

_THREADS = max(2, min(12, os.cpu_count() or 1))
_COMPILING = 0.6  # of a part's time, at most
_TURNS, _TURN_SECONDS = 4, 0.06
_SEVERAL_SECONDS = 0.015  # of the calls that are started before the last one is waited for


class Race(NamedTuple):
    """Functions that compute the same from the same arrays; each is a row.

    Attributes:
        work: what is computed.
        shapes: of the arrays, which are standard normal numbers.
        contestants: functions of the arrays, by name.
        peer: the function of `torch_peers` that computes it in PyTorch, if any.
        backward: also compute the gradients of all arrays, from a random cotangent.
        flop: floating point operations of a call.
        gigabytes: read and written by a call.
        dtype: of all arrays.
    """

    work: str
    shapes: Sequence[tuple[int, ...]]
    contestants: Mapping[str, Function]
    peer: str = ""
    backward: bool = False
    flop: float = 0.0
    gigabytes: float = 0.0
    dtype: str = "bfloat16"

    def structs(self) -> list[Any]:
        """The arrays' shapes and dtypes; the last array is the cotangent if it is `backward`."""
        structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in self.shapes]
        function = next(iter(self.contestants.values()))
        return [*structs, *([jax.eval_shape(function, *structs)] if self.backward else [])]

    def arrays(self) -> list[jax.Array]:
        rngs = jax.random.split(jax.random.key(0), 9)
        structs = zip(rngs, self.structs(), strict=False)
        return [jax.random.normal(rng, struct.shape, struct.dtype) for rng, struct in structs]

    def compiled(self, function: Function) -> tuple[Any, JSON]:
        """The program of a contestant, and what is known about it."""

        def with_gradients(*arrays: jax.Array) -> Any:
            output, pull_back = jax.vjp(function, *arrays[:-1])
            return output, pull_back(arrays[-1])

        structs, start = self.structs(), time.perf_counter()
        program = jax.jit(with_gradients if self.backward else function).lower(*structs).compile()
        seconds, memory = time.perf_counter() - start, program.memory_analysis()
        about = {"compile_seconds": seconds, "temporary_mib": memory.temp_size_in_bytes / 2**20}  # type: ignore[union-attr]
        return program, {name: significant(number) for name, number in about.items()}


def in_threads(record: Record, function: Callable[..., None], cases: Iterable[Sequence]) -> None:
    """Calls the function with each case. Ctrl-C closes the record, and the other cases are left."""
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for future in [pool.submit(function, *case) for case in cases]:
                future.result()
        except KeyboardInterrupt:
            record.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def measure(record: Record, part: str, races: Sequence[Race]) -> None:
    """Compiles all programs of a part, the first races first, then times race after race."""
    last = (1 - _COMPILING) * record.left()
    programs: dict[tuple[str, str], tuple[Any, JSON]] = {}

    def compile_one(race: Race, name: str) -> None:
        found, refusal = None, NOT_MEASURED
        if record.left() > last:
            found, refusal = attempt(race.compiled, race.contestants[name])
            record.note(f"{part}: compiled {race.work}, {name}")
        programs[race.work, name] = found or (None, refusal)

    cases = [(race, name) for race in races for name in race.contestants]
    missing = [(race, name) for race, name in cases if not record.has(part, race.work, name)]
    in_threads(record, compile_one, missing)
    rates = [row.get("tflops", 0.0) for row in record.rows("machine")]
    for race in races:
        names = [*race.contestants, *(["PyTorch"] if race.peer else [])]
        names = [name for name in names if not record.has(part, race.work, name)]
        rows = dict.fromkeys(names, NOT_MEASURED)
        if record.left() > 0 and names:
            rows = _timed(race, {name: programs.get((race.work, name)) for name in names})
        for name, row in rows.items():
            if "tflops" in row and any(rates):
                row = row | {"percent_of_product": significant(100 * row["tflops"] / max(rates))}
            record.add(part, race.work, name, **row)


def _timed(race: Race, programs: Mapping[str, tuple[Any, JSON] | None]) -> dict[str, JSON]:
    """The rows of a race; PyTorch has no program here."""
    rows: dict[str, JSON] = {}
    calls: dict[str, Callable[[], object]] = {}
    counts: dict[str, int] = {}
    arrays, refusal = attempt(race.arrays)
    if refusal:
        return dict.fromkeys(programs, refusal)
    for name, compiled in programs.items():
        program, row = compiled or attempt(_peer, race, arrays)
        if program is not None:
            call = program if compiled is None else functools.partial(_call, program, arrays)
            count, refusal = attempt(_calls_at_once, call)
            row = row | refusal
            if count:
                calls[name], counts[name] = functools.partial(call, count), count
        rows[name] = row
    turns, refusal = attempt(interleaved, calls, _TURNS, _TURN_SECONDS)
    for name, count in counts.items():
        rows[name] = rows[name] | (refusal or _rates(race, [turn / count for turn in turns[name]]))
    return rows


def _peer(race: Race, arrays: Sequence[jax.Array]) -> Callable[[int], None]:
    peers = import_peer("device_checks.torch_peers")
    call: Callable[[int], None] = peers.prepared(race.peer, arrays, race.backward)
    return call


def _call(program: Callable[..., Any], arrays: Sequence[jax.Array], count: int) -> None:
    """Starts `count` calls and waits for the last one: the device computes without a pause."""
    for _ in range(count):
        result = program(*arrays)
    jax.block_until_ready(result)


def _calls_at_once(call: Callable[[int], None]) -> int:
    call(1)
    start = time.perf_counter()
    call(1)
    return max(1, min(100, math.ceil(_SEVERAL_SECONDS / (time.perf_counter() - start))))


def _rates(race: Race, turns: list[float]) -> JSON:
    milliseconds = quartiles(turns)[1]
    amounts = {"tflops": race.flop / 1e12, "gigabytes_per_second": race.gigabytes}
    rates = {name: significant(1e3 * x / milliseconds) for name, x in amounts.items() if x}
    return {"milliseconds": milliseconds, "turns": [*map(significant, turns)], **rates}
