"""The layout in which a causal mask gives every device the same work.

Of n devices, each of which holds two of 2 n chunks, the natural order gives device p chunks 2 p and
2 p + 1, and a causal mask lets the last device's queries see everything and the first one's nothing
but themselves. Here device p holds chunks p and 2 n - 1 - p, an early one and a late one:

    device        0        1        2        3
    natural      0 1      2 3      4 5      6 7
    zigzag       0 7      1 6      2 5      3 4

Source: Brandon et al. 2023 for the imbalance (they stripe, which leaves no chunk in one piece);
this order is known as zigzag ring attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def chunk_starts(device: Array, devices: int, length: int) -> Array:
    """Int [2], the positions where a device's two chunks of this length begin."""
    return jnp.stack([device, 2 * devices - 1 - device]) * length


def to_zigzag(tokens: Array, axis: str) -> Array:
    """A device's tokens [2 * length, ...], in natural order -> those of the zigzag."""
    even, odd = (
        jax.lax.ppermute(half, axis, _to_homes(axis, parity))
        for parity, half in enumerate(jnp.split(tokens, 2))
    )
    # Of chunks p and 2 n - 1 - p one is even and one is odd.
    return jnp.concatenate(_in_order(even, odd, axis))


def from_zigzag(tokens: Array, axis: str) -> Array:
    """The way back."""
    early, late = jnp.split(tokens, 2)
    halves = _in_order(early, late, axis)
    return jnp.concatenate(
        [
            jax.lax.ppermute(half, axis, [(home, p) for p, home in _to_homes(axis, parity)])
            for parity, half in enumerate(halves)
        ]
    )


def _to_homes(axis: str, parity: int) -> list[tuple[int, int]]:
    """(device that holds chunk 2 p + parity in natural order, device that does in zigzag)."""
    devices = jax.lax.axis_size(axis)
    chunks = range(parity, 2 * devices, 2)
    return [(p, min(chunk, 2 * devices - 1 - chunk)) for p, chunk in enumerate(chunks)]


def _in_order(first: Array, second: Array, axis: str) -> tuple[Array, Array]:
    """(even chunk, odd chunk) -> (early chunk, late chunk), and the other way round."""
    swap = jax.lax.axis_index(axis) % 2 == 1
    return jax.lax.select(swap, second, first), jax.lax.select(swap, first, second)
