"""Every normaliser against softmax, forward and backward, both in tiles.

One example of scaled dot attention in float32. All normalisers take turns with softmax in the same
run. The gradients are those of query, key, value and the normaliser's parameters.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.functional.attention import attention
from attention_jax.normalizers import get_normalizer
from benchmarks.measure import (
    JSON,
    SHRUNK,
    Options,
    Report,
    compile_cold,
    interleaved_seconds,
    print_progress,
)
from benchmarks.targets import Target

_PEER = "softmax"
_LENGTH, _DIM = 4096, 64
# The most time, as a multiple of softmax's, and the most temporary memory in MiB.
TARGETS: dict[str, tuple[float, float | None]] = {
    "softmax(sink=True)": (1.1, None),
    "ssmax": (1.1, None),
    "sigmoid": (1.1, None),
    "entmax": (6.0, 32.0),
    "sparsemax": (6.0, 32.0),
    "log_scaled(normalizer=entmax)": (6.0, 32.0),
}

_COLUMNS = {
    "normaliser": ("normalizer", ""),
    "shape": ("shape", ""),
    "ms": ("milliseconds", ",.1f"),
    "time / softmax": ("times_softmax", ",.2f"),
    "target": ("target", ""),
    "met": ("met", ""),
    "temp. MiB": ("temporary_mib", ",.1f"),
    "target, MiB": ("memory_target", ""),
    "met, MiB": ("memory_met", ""),
}


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> list[Report]:
    """Times every normaliser, which take turns, and reads the memory of their programs."""
    length = max(8, _LENGTH // options.shrink)
    tokens = [jax.random.normal(jax.random.key(i), (length, _DIM)) for i in range(3)]
    calls, memory = {}, {}
    for name in (_PEER, *TARGETS):
        print_progress(f"normalizers: compiling {name}")
        calls[name], memory[name] = _contestant(name, tokens)
    seconds = interleaved_seconds(calls, options.repeats)
    peer = statistics.median(seconds[_PEER])
    rows = []
    for name in calls:
        median = statistics.median(seconds[name])
        row: JSON = {
            "normalizer": name,
            "shape": f"B1 N1 T=S={length} D{_DIM}",
            "milliseconds": 1000 * median,
            "times_softmax": median / peer,
            "temporary_mib": memory[name],
            "repeat_seconds": seconds[name],
        }
        time_limit, memory_limit = TARGETS.get(name, (None, None))
        row |= _target(row, "times_softmax", time_limit, "")
        rows.append(row | _target(row, "temporary_mib", memory_limit, "memory_"))
    report = Report(
        name="normalizers",
        title=f"Normalisers in tiles, forward + backward: median of {options.repeats} repeats",
        columns=_COLUMNS,
        rows=rows,
        settings={"repeats": options.repeats, "shrink": options.shrink},
        notes=[SHRUNK] * (options.shrink > 1),
        section=(),
    )
    return [report]


def _contestant(name: str, tokens: list[jax.Array]) -> tuple[Callable[[], object], float]:
    """(one call of attention and its gradients, temporary MiB of the program)."""
    normalizer = get_normalizer(name)
    params = normalizer.init(jax.random.key(0))

    def loss(query: Any, key: Any, value: Any, params: Any) -> jax.Array:
        output = attention(
            query,
            key,
            value,
            normalizer=normalizer,
            normalizer_params=params,
            implementation="tiled",
        )
        return jnp.sum(output**2)

    compiled = compile_cold(jax.value_and_grad(loss, (0, 1, 2, 3)), *tokens, params)
    call = functools.partial(compiled.call, *tokens, params)

    def one_repeat() -> object:
        return jax.block_until_ready(call())

    one_repeat()
    return one_repeat, compiled.temporary_mib


def _target(row: JSON, entry: str, limit: float | None, prefix: str) -> JSON:
    """The entries "target" and "met" of a row, with a prefix, if there is a limit."""
    if limit is None:
        return {}
    target = Target("", entry, lambda rows: rows[0][entry], "at most", limit).row([row])
    return {f"{prefix}{name}": target[name] for name in ("target", "met")}
