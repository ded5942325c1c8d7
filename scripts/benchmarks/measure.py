"""The frame of all measurements: contestants of a race take turns, and each of them has a row.

A race is data: what its rows have in common, and a function per contestant that prepares it.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.runs.progress import say

JSON = dict[str, Any]

_TURN_SECONDS = 0.5
_SLOW_SECONDS, _SLOW_TURNS = 2.0, 3  # a contestant whose call takes longer has fewer turns


class Contestant(NamedTuple):
    """A computation: calls it a number of times and waits for the last one; facts about it."""

    call: Callable[[int], Any]
    about: JSON


Prepare = Callable[[], Contestant]


class Race(NamedTuple):
    """Contestants at the same work.

    Attributes:
        about: the entries of all rows; "work" is the name, and "what" describes it.
        contestants: functions that prepare them, by name. The others are compared with the first.
        amounts: what a call does, by the name of its entry "per second"; e.g. {"rate": tokens}.
        is_timed: whether the programs run; if not, they are compiled only.
    """

    about: JSON
    contestants: Mapping[str, Prepare]
    amounts: Mapping[str, float] = {}
    is_timed: bool = True


Cases = dict[str, Race]


def run(race: Race, repeats: int) -> list[JSON]:
    """The rows of a race; each program is compiled as in a new process."""
    ready = {}
    for name, prepare in race.contestants.items():
        jax.clear_caches()
        ready[name] = attempt(prepare)
    rows = timed(race, ready, repeats)
    for row in rows:
        known = {key: row[key] for key in ("milliseconds", *REFUSALS) if key in row}
        say(f"{race.about['work']}: {row['contestant']}: {known or 'compiled'}", error=True)
    return rows


def timed(
    race: Race,
    ready: Mapping[str, tuple[Contestant | None, JSON]],
    repeats: int,
    turn_seconds: float | None = None,
    at_once: float = 0.0,
) -> list[JSON]:
    """Times contestants that take turns; returns a row for each.

    A row has the entries of `race.about`; "contestant"; what is known about it; "turns", their
    median "milliseconds", and their "quartiles". Instead of times, a contestant that fails has one
    of `REFUSALS`, with the reason.

    Args:
        race: the work.
        ready: what `attempt` returned for each contestant.
        repeats: number of turns.
        turn_seconds: as in `interleaved`.
        at_once: calls are started together until they take so many seconds.
    """
    rows: dict[str, JSON] = {}
    calls: dict[str, Callable[[], Any]] = {}
    counts: dict[str, int] = {}
    for name, (contestant, refusal) in ready.items():
        rows[name] = {**race.about, "contestant": name, **refusal}
        if contestant is not None:
            rows[name] |= contestant.about
        if contestant is not None and race.is_timed:
            count, refusal = attempt(_calls_at_once, contestant.call, at_once)
            rows[name] |= refusal
            if count:
                calls[name], counts[name] = functools.partial(contestant.call, count), count
    turns, refusal = attempt(interleaved, calls, repeats, turn_seconds)
    for name, count in counts.items():
        rows[name] |= refusal or _times(race, [turn / count for turn in turns[name]])
    return [*rows.values()]


def _calls_at_once(call: Callable[[int], Any], seconds: float) -> int:
    call(1)
    once = _seconds(functools.partial(call, 1))
    return max(1, min(100, math.ceil(seconds / once)))


def _times(race: Race, turns: list[float]) -> JSON:
    low, median, high = quartiles(turns)
    rates = {name: significant(1000 * x / median) for name, x in race.amounts.items() if x}
    turns = [*map(significant, turns)]
    return {"milliseconds": median, "quartiles": [low, high], "turns": turns, **rates}


def interleaved(
    calls: Mapping[str, Callable[[], object]], repeats: int, turn_seconds: float | None = None
) -> dict[str, list[float]]:
    """The milliseconds of each contestant in each of its turns, after a call to warm up.

    Contestants take turns (a, b, b, a, ...), so that a machine which slows down for a while slows
    all of them, and none always follows the same other one. A turn calls the contestant for
    `turn_seconds`, by default half a second, and is the median of all calls except the first. The
    first call is slowed by the contestant before it: freed gigabytes are faulted in again (100 ms
    of work took 180 ms), caches are cold, threads sleep.
    """
    turn_seconds = _TURN_SECONDS if turn_seconds is None else turn_seconds
    slow = {name for name, call in calls.items() if _seconds(call) > _SLOW_SECONDS}
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in [*calls] if repeat % 2 == 0 else [*calls][::-1]:
            if name in slow and repeat >= _SLOW_TURNS:
                continue
            end, seconds = time.perf_counter() + turn_seconds, [_seconds(calls[name])]
            while time.perf_counter() < end:
                seconds.append(_seconds(calls[name]))
            turns[name].append(significant(1000 * np.median(seconds[1:] or seconds)))
    return turns


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    low, median, high = np.percentile(numbers, (25, 50, 75))
    return significant(low), significant(median), significant(high)


def significant(number: float) -> float:
    """A number with five significant digits, for result files."""
    return float(f"{number:.5g}")


def ratio(over: JSON, under: JSON) -> tuple[float, float, float] | None:
    """Quartiles of one contestant's time divided by another's in the same turn, and the median."""
    turns = zip(over.get("turns", ()), under.get("turns", ()), strict=False)
    ratios = [a / b for a, b in turns]
    return quartiles(ratios) if ratios else None


# --- what fails ---

REFUSALS = ("absent", "not served", "error")  # entries of a row that say why there is no number


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, JSON]:
    """(what the function returns, {}), or (None, the entry of a row that says why it failed).

    Whatever one program raises (a compiler's error, no memory), the others go on.
    """
    try:
        return function(*arguments), {}
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        if isinstance(error, NotImplementedError):
            return None, {"not served": reason}
        if type(error) is LookupError:  # a peer that is not installed
            return None, {"absent": reason}
        return None, {"error": f"{type(error).__name__}: {reason}"}


def import_peer(module: str) -> Any:
    """The module; a LookupError that says how to install it if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LookupError(f"{reason}; .venv/bin/pip install -e '.[bench]'") from error


# --- programs ---

FORWARD, GRAD, JVP = "forward", "forward + backward", "jvp"


def compiled(function: Callable, *arguments: Any) -> Contestant:
    """A contestant that calls a function of arrays, compiled, with these arguments.

    It knows its "compile_seconds" and "temporary_mib", its peak beside arguments and results.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: its arguments; or a `jax.ShapeDtypeStruct` in place of each array, for a program
            that is not called.
    """
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    assert memory is not None  # CPU, GPU and TPU all report it

    def call(count: int) -> Any:
        for _ in range(count):  # the device computes without a pause
            result = program(*arguments)
        return jax.block_until_ready(result)

    numbers = {"compile_seconds": seconds, "temporary_mib": memory.temp_size_in_bytes / 2**20}
    return Contestant(call, {name: significant(number) for name, number in numbers.items()})


def derivative(direction: str, attend: Callable[[Any], jax.Array]) -> Callable[..., Any]:
    """A derivative of a function of one pytree: a function of inputs, cotangent and tangent.

    With `GRAD` it returns the output, too.
    """

    def grad(inputs: Any, cotangent: jax.Array, tangent: Any) -> Any:
        output, pull_back = jax.vjp(attend, inputs)
        return output, pull_back(cotangent)[0]

    def slope(inputs: Any, cotangent: jax.Array, tangent: Any) -> Any:
        products = jax.tree.map(jnp.vdot, grad(inputs, cotangent, tangent)[1], tangent)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    def jvp_of_grad(inputs: Any, cotangent: jax.Array, tangent: Any) -> Any:
        return jax.jvp(lambda x: grad(x, cotangent, tangent)[1], (inputs,), (tangent,))

    return {
        FORWARD: lambda inputs, cotangent, tangent: attend(inputs),
        GRAD: grad,
        JVP: lambda inputs, cotangent, tangent: jax.jvp(attend, (inputs,), (tangent,)),
        "jvp of grad": jvp_of_grad,
        "grad of grad": jax.grad(slope),
    }[direction]
