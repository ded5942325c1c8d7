"""What survives dropout, as a function of (rng, row, column): attention weights, and features.

Each entry's fate is a hash of a seed and its two positions. It does not depend on which other
entries are computed with it, so forward, backward, any tile and any implementation agree, and
nothing of size [T, S] is ever stored. XLA fuses the hash with what is dropped, where a generator of
random bits would be a pass of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attention_jax.core.bits import GOLDEN, mix

Array = jax.Array


def keep_mask(rng: Array, rate: float, query_positions: Array, key_positions: Array) -> Array:
    """True where the weight of a pair is kept, with probability 1 - rate, independently.

    Args:
        rng: one PRNG key (of one example).
        rate: probability of dropping, 0 <= rate < 1, in steps of 2^-32.
        query_positions: int [t].
        key_positions: int [s].

    Returns:
        bool [t, s].
    """
    row_seed, column_seed = jax.random.bits(rng, (2,), jnp.uint32)
    rows = mix(query_positions.astype(jnp.uint32) * jnp.uint32(GOLDEN) + row_seed)
    columns = mix(key_positions.astype(jnp.uint32) * jnp.uint32(GOLDEN) + column_seed)
    bits = mix(rows[:, None] + columns[None, :])
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def drop(weights: Array, keep: Array, rate: float) -> Array:
    """Weights with the dropped ones 0 and the kept ones divided by 1 - rate."""
    return jnp.where(keep, weights / (1 - rate), 0)


def drop_features(x: Array, rng: Array | None, rate: float) -> Array:
    """x [..., D] with features dropped independently, those kept divided by 1 - rate.

    Args:
        x: float [..., D].
        rng: one PRNG key; None for x as it is.
        rate: as in `keep_mask`.

    Source: Srivastava et al. 2014, their p is 1 - rate; divided in training and not multiplied in
        evaluation.
    """
    if rng is None or rate == 0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    keep = keep_mask(rng, rate, *(jnp.arange(size) for size in rows.shape))
    return drop(rows, keep, rate).reshape(x.shape)
