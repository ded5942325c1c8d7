"""The edges and the trace of a Hessian's spectrum from one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.analysis.curvature import (
    Estimate,
    Loss,
    SpectrumEdges,
    estimate_of,
    flattened,
    random_signs,
    with_sample,
)
from attention_jax.analysis.lanczos import Lanczos, LanczosRow, dot

Array = jax.Array


def spectrum_edges_and_trace(
    loss: Loss,
    params: Any,
    rngs: tuple[Array, Array],
    *,
    iterations: int,
    samples: int,
    outer: str = "forward",
) -> tuple[SpectrumEdges, Estimate]:
    """`hessian_spectrum_edges` and `hessian_trace` in one loop.

    The product with the Hessian, which is nearly all of the program, is compiled once and not
    twice.

    Args:
        loss, params, outer: as in `hessian_spectrum_edges`.
        rngs: the PRNG keys of the two.
        iterations: as in `hessian_spectrum_edges`.
        samples: as in `hessian_trace`.
    """
    point, product, _ = flattened(loss, params, outer)
    lanczos = Lanczos(min(iterations, point.size), point, rngs[0])
    zero = jnp.zeros((), point.dtype)
    no_row = LanczosRow(zero, zero, zero)

    def step(carry: Any, j: Array) -> tuple[Any, LanczosRow]:
        in_lanczos, number = j < lanczos.size, j - lanczos.size
        vector = jax.lax.cond(
            in_lanczos,
            lambda: lanczos.vector(carry[0], j),
            lambda: random_signs(point, rngs[1], number),
        )
        image = product(vector)

        def update_edges() -> tuple[Any, LanczosRow]:
            edges, row = lanczos.update(carry[0], j, image)
            return (edges, carry[1]), row

        def update_trace() -> tuple[Any, LanczosRow]:
            return (carry[0], with_sample(carry[1], number, dot(vector, image))), no_row

        return jax.lax.cond(in_lanczos, update_edges, update_trace)

    carry = lanczos.start(), (zero, zero)
    (_, trace), rows = jax.lax.scan(step, carry, jnp.arange(lanczos.size + samples))
    rows = jax.tree.map(lambda column: column[: lanczos.size], rows)
    return lanczos.edges(rows), estimate_of(trace, samples)
