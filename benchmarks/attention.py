"""Benchmarks of attention: times of all works, memory of all derivatives, windows, and rings.

Programs whose memory is measured are compiled and not run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax import Additive, ScaledDot, Score, ring_attention
from attention_jax.functional.centers import monotonic_centers
from attention_jax.functional.local import local_attention
from benchmarks.measure import FORWARD, GRAD, Cases, Contestant, Race, compiled, derivative
from benchmarks.peers import PEERS, TOKENS, jax_contestant, ours
from benchmarks.works import WORKS, Tree, Work


def times(options: Any) -> Cases:
    """Our attention and its peers."""

    def race(work: Work) -> Race:
        contestants = {"ours": ours, **{name: PEERS[name] for name in work.peers}}
        prepare = {name: functools.partial(make, work) for name, make in contestants.items()}
        return Race(work.described(), prepare)

    return {work.name: race(work.shrunk(options.shrink)) for work in WORKS["attention"]}


def memory(options: Any) -> Cases:
    """Temporary memory at two lengths; a target reads that of the longer one, "ours"."""

    def race(work: Work) -> Race:
        name = "ours" if work.implementation == "tiled" else f"ours, {work.implementation}"
        longer = work.but(length=4 * work.length)
        contestants = {f"{name}, a quarter as long": work, name: longer}
        prepare = {name: functools.partial(ours, work) for name, work in contestants.items()}
        return Race(work.described(), prepare, is_timed=False)

    return {work.name: race(work.shrunk(options.shrink)) for work in WORKS["attention_memory"]}


# --- windows ---


def windows(options: Any) -> Cases:
    """Local against global attention with the same score, forward and backward.

    Luong's local attention reads 2 D + 1 keys around a center; global attention reads all keys.
    With a Gaussian (local-p) local attention has the gradient of the centers, too.
    """
    radius = max(1, 64 // options.shrink)

    def race(work: Work) -> Race:
        about = work.described()
        about["what"] += f", radius {radius}"
        attend = functools.partial(local, work, radius, gaussian=work.name == "local-p")
        return Race(about, {"local": attend, "global": functools.partial(ours, work)})

    return {work.name: race(work.shrunk(options.shrink)) for work in WORKS["local"]}


def local(work: Work, radius: int, gaussian: bool) -> Contestant:
    """Attention through windows; the standard deviation of the Gaussian is half the radius."""
    centers = monotonic_centers(work.length)
    others: Tree = {"centers": jnp.asarray(centers, jnp.float32)} if gaussian else {}
    window: Any = {"radius": radius, "sigma": radius / 2 if gaussian else None}

    def attend(inputs: Tree) -> jax.Array:
        arguments = {"centers": centers, **inputs, **window}
        return local_attention(**arguments, score=work.score_object())

    return jax_contestant(work, attend, **others)


# --- rings ---

_DEVICES = (1, 2, 4, 8)


def rings(options: Any) -> Cases:
    """Memory of ring attention on each of several devices, which are simulated on the CPU."""
    jax.config.update("jax_num_cpu_devices", max(_DEVICES))  # before JAX starts
    length = max(16384 // options.shrink, 2 * max(_DEVICES))
    cases = {}
    for name, score in {"scaled dot": ScaledDot(), "additive": Additive(128)}.items():
        for direction in (FORWARD, GRAD):
            prepare = {
                f"{count} devices": functools.partial(_ring, score, direction, length, count)
                for count in _DEVICES
            }
            about = {"work": f"{name}, {direction}"}
            cases[f"ring-{name}-{direction}"] = Race(about, prepare, is_timed=False)
    return cases


def _ring(score: Score, direction: str, length: int, count: int) -> Contestant:
    devices, types = jax.devices()[:count], (AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("context",), axis_types=types, devices=devices)
    sharding = NamedSharding(mesh, PartitionSpec("context"))
    tokens = jax.ShapeDtypeStruct((length, 64), jnp.float32, sharding=sharding)
    inputs = {"params": score.init(jax.random.key(0), 64, 64), **dict.fromkeys(TOKENS, tokens)}

    def attend(inputs: Tree) -> jax.Array:
        return ring_attention(**inputs, mesh=mesh, score=score)

    return compiled(derivative(direction, attend), inputs, tokens, inputs)
