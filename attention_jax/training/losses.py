"""What training minimises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

Array = jax.Array


def real_tokens(lengths: Array, size: int) -> Array:
    """Bool [B, size]: True for the first `lengths` [B] positions of each row."""
    return jnp.arange(size)[None, :] < lengths[:, None]


def cross_entropy(logits: Array, targets: Array, target_lengths: Array) -> Array:
    """Mean negative log-likelihood, in nats, of the real target tokens; padding counts nowhere.

    Args:
        logits: float [B, T, V].
        targets: int [B, T].
        target_lengths: int [B], real tokens of each row.

    Returns:
        float [], 0 if there is no real token.

    >>> cross_entropy(jnp.zeros((1, 2, 4)), jnp.array([[3, 0]]), jnp.array([1])).round(4)  # log 4
    Array(1.3863, dtype=float32)
    """
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    real = real_tokens(target_lengths, targets.shape[1])
    count = jnp.maximum(jnp.sum(real), 1).astype(nats.dtype)
    return jnp.sum(jnp.where(real, nats, 0)) / count
