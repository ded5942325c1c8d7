"""The zigzag layout of a sequence over devices, which balances the work of a causal mask.

Each of n devices holds two of 2 n chunks. In natural order device p holds chunks 2 p and 2 p + 1,
and with a causal mask the queries of the last device attend to all keys, those of the first only to
their own. In zigzag order device p holds chunks p and 2 n - 1 - p, an early and a late chunk:

    device        0        1        2        3
    natural      0 1      2 3      4 5      6 7
    zigzag       0 7      1 6      2 5      3 4

Source: Brandon et al. 2023 for the imbalance (they stripe single tokens over the devices, so that
no chunk is contiguous); this order is known as zigzag ring attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def chunk_starts(device: Array, devices: int, length: int) -> Array:
    """The positions of the first tokens of a device's two chunks, int [2]."""
    return jnp.stack([device, 2 * devices - 1 - device]) * length


def to_zigzag(tokens: Array, axis: str) -> Array:
    """A device's tokens [2 * length, ...] in natural order -> its tokens in zigzag order."""
    even, odd = (
        jax.lax.ppermute(half, axis, _permutation(axis, parity))
        for parity, half in enumerate(jnp.split(tokens, 2))
    )
    # One of the chunks p and 2 n - 1 - p is even, the other odd.
    return jnp.concatenate(_swap_on_odd_devices(even, odd, axis))


def from_zigzag(tokens: Array, axis: str) -> Array:
    """The inverse of `to_zigzag`."""
    early, late = jnp.split(tokens, 2)
    halves = _swap_on_odd_devices(early, late, axis)
    return jnp.concatenate(
        [
            jax.lax.ppermute(half, axis, _inverse(_permutation(axis, parity)))
            for parity, half in enumerate(halves)
        ]
    )


def _permutation(axis: str, parity: int) -> list[tuple[int, int]]:
    """For chunk 2 p + parity of each p: (its device in natural order, its device in zigzag)."""
    devices = jax.lax.axis_size(axis)
    chunks = range(parity, 2 * devices, 2)
    return [(p, min(chunk, 2 * devices - 1 - chunk)) for p, chunk in enumerate(chunks)]


def _inverse(permutation: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The inverse of a permutation of devices."""
    return [(target, source) for source, target in permutation]


def _swap_on_odd_devices(first: Array, second: Array, axis: str) -> tuple[Array, Array]:
    """(even chunk, odd chunk) -> (early chunk, late chunk); it is its own inverse."""
    swap = jax.lax.axis_index(axis) % 2 == 1
    return jax.lax.select(swap, second, first), jax.lax.select(swap, first, second)
