"""Local against global attention with the same score, forward and backward.

Luong's local attention reads 2 D + 1 keys around a center; global attention reads all keys. Both
get the same query, key and value. Both compute the gradients of these and of the score's
parameters; local attention with a Gaussian (local-p) also computes the gradient of the centers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from attention_jax.functional.centers import monotonic_centers
from attention_jax.functional.local import local_attention
from benchmarks import measure
from benchmarks.contestants import jax_contestant, ours
from benchmarks.works import GRAD, Tree, Work

_RADIUS = 64
_SCALED = Work("local-m", "scaled", 8192, GRAD)
_WORKS = (  # the second damps weights by a Gaussian of standard deviation D / 2
    _SCALED,
    _SCALED.but(name="local-p"),
    _SCALED.but(name="local-m-additive", score="additive", hidden_dim=64),
)


def _race(work: Work, options: measure.Options) -> list[measure.JSON]:
    radius = max(1, _RADIUS // options.shrink)
    contestants = {
        "local": functools.partial(local, work, radius, gaussian=work.name == "local-p"),
        "global": functools.partial(ours, work),
    }
    described = work.described()
    described["what"] += f", radius {radius}"
    return measure.race(described, contestants, options.repeats)


def local(work: Work, radius: int, gaussian: bool) -> measure.Contestant:
    """Attention through windows; with a Gaussian, the centers are among its inputs."""
    inputs, _ = work.arrays()
    centers = monotonic_centers(work.length)
    window: dict[str, Any] = {"radius": radius, "sigma": radius / 2 if gaussian else None}
    if gaussian:
        inputs["centers"] = np.asarray(centers, np.float32)

    def attend(inputs: Tree) -> jax.Array:
        arguments = {"centers": centers, **inputs, **window}
        return local_attention(**arguments, score=work.score_object())

    return jax_contestant(work, attend, inputs=inputs)


LOCAL = measure.Benchmark(
    "local",
    lambda options: {
        work.name: functools.partial(_race, work.shrunk(options.shrink), options) for work in _WORKS
    },
)
