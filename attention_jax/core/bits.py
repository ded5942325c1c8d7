"""A hash of 32-bit integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: consecutive multiples land far apart


def mix(bits: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3 (Appleby 2011), uint32 -> uint32.

    Every input bit flips half of the output bits on average, and the map is a bijection.
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
