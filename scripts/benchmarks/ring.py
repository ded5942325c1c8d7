"""Memory of ring attention on each of several devices, as XLA reports it for compiled programs.

The devices are simulated on the CPU, so this benchmark must be measured alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax import Additive, ScaledDot, Score, ring_attention
from attention_jax.runs.progress import say
from benchmarks.contestants import TOKENS, program
from benchmarks.measure import JSON, Benchmark, Cases, Options, compile_cold
from benchmarks.tables import entry
from benchmarks.works import FORWARD, GRAD, Tree, Work

_DEVICES = (1, 2, 4, 8)
_LENGTH, _DIM, _HIDDEN = 16384, 64, 128


def _cases(options: Options) -> Cases:
    jax.config.update("jax_num_cpu_devices", max(_DEVICES))  # before JAX starts
    length = max(_LENGTH // options.shrink, 2 * max(_DEVICES))
    return {
        f"ring-{name}-{direction}": functools.partial(_rows, name, score, direction, length)
        for name, score in {"scaled dot": ScaledDot(), "additive": Additive(_HIDDEN)}.items()
        for direction in (FORWARD, GRAD)
    }


def _rows(name: str, score: Score, direction: str, length: int) -> list[JSON]:
    """A row per number of devices; the programs are compiled and not run."""
    work = Work("", name, length, direction, dim=_DIM)
    params = score.init(jax.random.key(0), _DIM, _DIM)
    rows = []
    for count in _DEVICES:
        say(f"ring, {name}, {direction}: compiling for {count} devices", error=True)
        devices, types = jax.devices()[:count], (AxisType.Auto,)
        mesh = jax.make_mesh((count,), ("context",), axis_types=types, devices=devices)
        sharding = NamedSharding(mesh, PartitionSpec("context"))
        tokens = jax.ShapeDtypeStruct((length, _DIM), jnp.float32, sharding=sharding)
        inputs = {"params": params, **dict.fromkeys(TOKENS, tokens)}

        def attend(inputs: Tree, mesh: jax.sharding.Mesh = mesh) -> jax.Array:
            return ring_attention(**inputs, mesh=mesh, score=score)

        about = compile_cold(program(work, attend), inputs, tokens, inputs).about
        rows.append({"work": f"{name}, {direction}", "devices": count, **about})
    return rows


RING = Benchmark(
    "ring",
    _cases,
    {"temporary MiB per device": entry("work")}
    | {
        f"{count} devices": lambda rows, index=index: entry("temporary_mib", ".1f")(rows[index:])
        for index, count in enumerate(_DEVICES)
    },
)
