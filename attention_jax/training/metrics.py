"""Accuracies over real tokens, and means over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.training.losses import real_tokens

Array = jax.Array


def token_accuracy(predictions: Array, targets: Array, target_lengths: Array) -> Array:
    """Share of the real target tokens that are predicted correctly; float32 [].

    Args:
        predictions: int [B, T].
        targets: int [B, T].
        target_lengths: int [B].

    >>> token_accuracy(jnp.array([[3, 4, 9]]), jnp.array([[3, 5, 9]]), jnp.array([2]))
    Array(0.5, dtype=float32)
    """
    real = real_tokens(target_lengths, targets.shape[1])
    right = jnp.sum(real & (predictions == targets))
    return right.astype(jnp.float32) / jnp.maximum(jnp.sum(real), 1).astype(jnp.float32)


def exact_match(predictions: Array, targets: Array, target_lengths: Array) -> Array:
    """Share of the rows whose real target tokens are all predicted correctly; float32 [].

    With EOS among the real tokens, a row matches only if it also ends at the correct position.

    >>> exact_match(jnp.array([[3, 4], [3, 9]]), jnp.array([[3, 4], [3, 5]]), jnp.array([2, 2]))
    Array(0.5, dtype=float32)
    """
    real = real_tokens(target_lengths, targets.shape[1])
    return jnp.mean(jnp.all(~real | (predictions == targets), axis=1).astype(jnp.float32))


def mean_and_deviation(by_seed: np.ndarray | Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation over the last axis, the seeds; 0 for a single seed.

    >>> [float(x) for x in mean_and_deviation([1.0, 2.0, 3.0])]
    [2.0, 1.0]
    """
    values = np.asarray(by_seed)
    seeds = values.shape[-1]
    return values.mean(axis=-1), values.std(axis=-1, ddof=1 if seeds > 1 else 0)
