"""Memory of ring attention on each of several devices, as XLA reports it for compiled programs.

The devices are simulated on the CPU. XLA must know their number before JAX starts, so the rows come
from another process, which runs this file as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax import Additive, get_score, ring_attention

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file runs as a script

from benchmarks.measure import JSON, Options, Report, print_progress

_DEVICES = (1, 2, 4, 8)
_LENGTH, _DIM, _HIDDEN = 16384, 64, 128

_COLUMNS = {
    "score": ("score", ""),
    "direction": ("direction", ""),
    "devices": ("devices", "d"),
    "temporary MiB": ("temporary_mib", ",.1f"),
    "arguments MiB": ("argument_mib", ",.1f"),
}


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> list[Report]:
    """Compiles scaled dot and additive attention, forward and backward, for 1 to 8 devices."""
    length = max(_LENGTH // options.shrink, 2 * max(_DEVICES))
    flags = f"--xla_force_host_platform_device_count={max(_DEVICES)}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, __file__, str(length)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report = Report(
        name="ring",
        title=f"Memory of ring attention on each device, T=S={length} D={_DIM}, float32",
        columns=_COLUMNS,
        rows=json.loads(process.stdout),
        settings={"length": length, "dim": _DIM, "hidden_dim": _HIDDEN},
        notes=[],
        section=("score", "direction"),
    )
    return [report]


def main(length: int) -> None:
    """Prints the rows as JSON."""
    rows = []
    for name in ("scaled", "additive"):
        for direction in ("forward", "forward + backward"):
            for devices in _DEVICES:
                print_progress(f"ring, {name}, {direction}, {devices} devices")
                rows.append(_row(name, direction, devices, length))
    print(json.dumps(rows))


def _row(name: str, direction: str, devices: int, length: int) -> JSON:
    score = Additive(_HIDDEN) if name == "additive" else get_score(name)
    params = score.init(jax.random.key(0), _DIM, _DIM)
    mesh = jax.make_mesh(
        (devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    sharding = NamedSharding(mesh, PartitionSpec("context"))
    tokens = jax.ShapeDtypeStruct((length, _DIM), jnp.float32, sharding=sharding)

    def attend(params: Any, *tokens: jax.Array) -> jax.Array:
        return ring_attention(*tokens, mesh=mesh, score=score, params=params)

    def gradient(params: Any, doutput: jax.Array, *tokens: jax.Array) -> Any:
        return jax.vjp(attend, params, *tokens)[1](doutput)

    function, count = (attend, 3) if direction == "forward" else (gradient, 4)
    memory = jax.jit(function).lower(params, *[tokens] * count).compile().memory_analysis()
    assert memory is not None  # CPUs report it
    return {
        "score": name,
        "direction": direction,
        "devices": devices,
        "temporary_mib": memory.temp_size_in_bytes / 2**20,
        "argument_mib": memory.argument_size_in_bytes / 2**20,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
