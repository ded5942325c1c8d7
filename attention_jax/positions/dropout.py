"""Dropout masks of attention weights and features, as functions of (rng, row, column).

A hash of a seed and two positions decides about each entry. It does not depend on the other entries
that are computed with it, so that forward, backward, all tiles and all implementations agree, and
no array [T, S] is stored. XLA fuses the hash with the operation on the entries, where a generator
of random bits would need another pass.
"""

import jax
import jax.numpy as jnp

from attention_jax.core.checks import counter_based
from attention_jax.positions.contract import Mask
from attention_jax.positions.function import array_field, position_dataclass

Array = jax.Array

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: consecutive multiples land far apart


def keep_mask(rng: Array, rate: float, query_positions: Array, key_positions: Array) -> Array:
    """True where the weight of a pair is kept, independently with probability 1 - rate.

    Args:
        rng: one PRNG key, for one example.
        rate: probability of dropping, 0 <= rate < 1, rounded to a multiple of 2^-32.
        query_positions: int [t].
        key_positions: int [s].

    Returns:
        bool [t, s].
    """
    row_seed, column_seed = jax.random.bits(counter_based(rng), (2,), jnp.uint32)
    rows = _mix(query_positions.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + row_seed)
    columns = _mix(key_positions.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + column_seed)
    bits = _mix(rows[:, None] + columns[None, :])
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(bits: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3 (Appleby 2011), uint32 -> uint32.

    Every input bit flips half of the output bits on average, and the map is a bijection.
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


@position_dataclass
class DropoutMask(Mask):
    """True for the weights that dropout keeps: a function of positions, like every mask."""

    rate: float
    rng: Array = array_field()

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return keep_mask(self.rng, self.rate, query_positions, key_positions)


def drop(weights: Array, keep: Array, rate: float) -> Array:
    """Sets dropped weights to 0 and divides kept weights by 1 - rate."""
    return jnp.where(keep, weights / (1 - rate), 0)


def drop_features(x: Array, rng: Array | None, rate: float) -> Array:
    """Drops features of x [..., D] independently, and divides kept features by 1 - rate.

    Args:
        x: float [..., D].
        rng: one PRNG key; None returns x unchanged.
        rate: as in `keep_mask`.

    Source: Srivastava et al. 2014; their p is 1 - rate, and they multiply by p in evaluation
        instead of dividing by it in training.
    """
    if rng is None or rate == 0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    keep = keep_mask(rng, rate, *(jnp.arange(size) for size in rows.shape))
    return drop(rows, keep, rate).reshape(x.shape)
