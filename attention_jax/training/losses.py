"""What training minimises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

Array = jax.Array


def real_tokens(lengths: Array, size: int) -> Array:
    """Bool [B, size]: True for the first `lengths` [B] positions of each row."""
    return jnp.arange(size)[None, :] < lengths[:, None]


def masked_mean(values: Array, lengths: Array) -> Array:
    """The mean of values [B, size] over the first `lengths` [B] of each row; 0 if there are none.

    >>> masked_mean(jnp.array([[1.0, 9.0], [3.0, 5.0]]), jnp.array([1, 2]))
    Array(3., dtype=float32)
    """
    real = real_tokens(lengths, values.shape[1])
    count = jnp.maximum(jnp.sum(real), 1).astype(values.dtype)
    return jnp.sum(jnp.where(real, values, 0)) / count


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
    return masked_mean(nats, target_lengths)
