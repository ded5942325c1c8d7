"""Programs that compile in several threads at once, and are then timed in turns, alone."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.measure import import_peer, interleaved, quartiles, significant

from device_checks.record import JSON, Record, attempt

Function = Callable[..., jax.Array]  # of arrays; returns attention's output

_THREADS = max(2, min(12, os.cpu_count() or 1))
_TURNS = 4
_TURN_SECONDS = 0.06
_BATCH_SECONDS = 0.015  # of the calls that are started before one of them is waited for
_COMPILING = 0.6  # of a part's time, at most


@dataclasses.dataclass(frozen=True)
class Race:
    """Functions that compute the same from the same arrays; each is a row.

    Attributes:
        work: what is computed.
        shapes: of the arrays, which are standard normal numbers.
        contestants: functions of the arrays, by name.
        peers: names of functions of `torch_peers`, by contestant.
        backward: also compute the gradients of all arrays, from a random cotangent.
        flop: floating point operations of a call, forward and backward.
        gigabytes: read and written by a call.
        dtype: of all arrays.
    """

    work: str
    shapes: Sequence[tuple[int, ...]]
    contestants: Mapping[str, Function]
    peers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    backward: bool = False
    flop: float = 0.0
    gigabytes: float = 0.0
    dtype: str = "bfloat16"

    def program(self, function: Function) -> Function:
        """What a contestant computes of the arrays, and of a cotangent if it is `backward`."""

        def with_gradients(*arrays: jax.Array) -> Any:
            output, pull_back = jax.vjp(function, *arrays[:-1])
            return output, pull_back(arrays[-1])

        return with_gradients if self.backward else function

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays' shapes and dtypes; the last array is the cotangent if it is `backward`."""
        structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in self.shapes]
        function = next(iter(self.contestants.values()))
        return [*structs, *([jax.eval_shape(function, *structs)] if self.backward else [])]

    def arrays(self) -> list[jax.Array]:
        """Standard normal numbers."""
        rng = np.random.default_rng(0)
        draws = (rng.standard_normal(struct.shape, np.float32) for struct in self.structs())
        return [jnp.asarray(draw, self.dtype) for draw in draws]


def in_threads(record: Record, function: Callable[[Any], None], cases: Iterable[Any]) -> None:
    """Calls the function with each case. Ctrl-C closes the record, and the other cases are left."""
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for future in [pool.submit(function, case) for case in cases]:
                future.result()
        except KeyboardInterrupt:
            record.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def measure(record: Record, part: str, races: Sequence[Race]) -> None:
    """Compiles all programs of a part, the first races first, then times race after race."""
    programs: dict[tuple[str, str], tuple[Any, JSON]] = {}
    last = (1 - _COMPILING) * record.left()

    def compile_one(case: tuple[Race, str]) -> None:
        race, name = case
        found: tuple[Any, JSON] = None, {"not measured": "no time left to compile"}
        if record.left() > last:
            found = attempt(_compiled, race, race.contestants[name])
            record.note(f"{part}: compiled {race.work}, {name}")
        programs[race.work, name] = found

    cases = [(race, name) for race in races for name in race.contestants]
    missing = [(race, name) for race, name in cases if not record.has(part, race.work, name)]
    in_threads(record, compile_one, missing)
    for race in races:
        _time(record, part, race, programs)


def _compiled(race: Race, function: Function) -> tuple[Any, JSON]:
    structs = race.structs()
    start = time.perf_counter()
    program = jax.jit(race.program(function)).lower(*structs).compile()
    about = {"compile_seconds": significant(time.perf_counter() - start)}
    memory: Any = program.memory_analysis()
    return program, about | {"temporary_mib": significant(memory.temp_size_in_bytes / 2**20)}


def _time(record: Record, part: str, race: Race, programs: Mapping[Any, Any]) -> None:
    """Adds the rows of a race."""
    names = [x for x in (*race.contestants, *race.peers) if not record.has(part, race.work, x)]
    rows: dict[str, JSON] = {name: {"not measured": "no time left"} for name in names}
    calls: dict[str, Callable[[], object]] = {}
    counts: dict[str, int] = {}
    arrays: list[jax.Array] = []
    for name in names:
        if record.left() <= 0:
            break
        arrays = arrays or race.arrays()
        if name in race.peers:
            prepared, rows[name] = attempt(_peer, race, race.peers[name], arrays)
        else:
            prepared, rows[name] = programs[race.work, name]
            if prepared is not None:
                program, rows[name] = prepared
                prepared = functools.partial(program, *arrays), jax.block_until_ready
        if prepared is not None:
            several, refusal = attempt(_several, *prepared)
            rows[name] |= refusal
            if several is not None:
                calls[name], counts[name] = several
    turns, refusal = attempt(interleaved, calls, _TURNS, _TURN_SECONDS)
    for name, row in rows.items():
        if name in calls:
            row |= refusal or _rates(race, turns[name], counts[name])
        record.add(part, race.work, name, **row)


def _peer(race: Race, function: str, arrays: Sequence[jax.Array]) -> Any:
    return import_peer("device_checks.torch_peers").prepared(function, arrays, race.backward)


def _several(call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[Callable[[], Any], int]:
    """A function that starts many short calls and waits for the last one, and how many they are.

    An accelerator computes while the host starts the next call, as it does in a training loop.
    """
    wait(call())
    start = time.perf_counter()
    wait(call())
    count = max(1, min(100, math.ceil(_BATCH_SECONDS / (time.perf_counter() - start))))

    def calls() -> None:
        for _ in range(count):
            result = call()
        wait(result)

    return calls, count


def _rates(race: Race, turns: Sequence[float], count: int) -> JSON:
    """The milliseconds of a call, from turns of `count` calls, and rates."""
    turns = [significant(milliseconds / count) for milliseconds in turns]
    milliseconds = quartiles(turns)[1]
    amounts = {"tflops": race.flop / 1e12, "gigabytes_per_second": race.gigabytes}
    rates = {name: significant(1e3 * x / milliseconds) for name, x in amounts.items() if x}
    return {"milliseconds": milliseconds, "turns": turns, **rates}
