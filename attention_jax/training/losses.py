"""Losses over the real tokens of padded sequences."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import checked_fraction
from attention_jax.core.products import einsum

Array = jax.Array


def real_tokens(lengths: Array, size: int) -> Array:
    """Bool [B, size]: True for the first `lengths` [B] positions of each row."""
    return jnp.arange(size)[None, :] < lengths[:, None]


def masked_mean(values: Array, lengths: Array) -> Array:
    """The mean of values [B, size] over the first `lengths` [B] of each row; 0 without any.

    >>> masked_mean(jnp.array([[1.0, 9.0], [3.0, 5.0]]), jnp.array([1, 2]))
    Array(3., dtype=float32)
    """
    real = real_tokens(lengths, values.shape[1])
    count = jnp.maximum(jnp.sum(real), 1).astype(values.dtype)
    return jnp.sum(jnp.where(real, values, 0)) / count


def cross_entropy(logits: Array, targets: Array, target_lengths: Array) -> Array:
    """Mean negative log-likelihood, in nats, of the real target tokens, without padding.

    Args:
        logits: float [B, T, V].
        targets: int [B, T].
        target_lengths: int [B], real tokens of each row.

    Returns:
        float [], 0 if there is no real token.

    >>> loss = jax.jit(cross_entropy)
    >>> loss(jnp.zeros((1, 2, 4)), jnp.array([[3, 0]]), jnp.array([1])).round(4)  # log 4
    Array(1.3863, dtype=float32)
    """
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return masked_mean(nats, target_lengths)


class CrossEntropySums(NamedTuple):
    """Sums over the real tokens; float32 [], or float64 if the features are."""

    loss: Array  # in nats, with label smoothing
    negative_log_likelihood: Array  # in nats, without label smoothing
    correct: Array  # tokens whose logit is the largest


def output_cross_entropy(
    features: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    real: Array,
    *,
    label_smoothing: float = 0.0,
) -> CrossEntropySums:
    """The output layer and its cross entropy.

        l_m  = features_m kernel + bias
        loss = sum over real m of logsumexp(l_m) - (1 - s) l_m[targets_m] - s mean(l_m)

    with s the label smoothing: the target distribution has 1 - s on the target, and s spread evenly
    over all V tokens.

    Args:
        features: float [*B, M, D].
        kernel: float [D, V].
        bias: float [V], or None.
        targets: int [*B, M], 0 to V - 1; another number makes the loss NaN.
        real: bool [*B, M], False for padding, which contributes to no sum and gets no gradient.
        label_smoothing: 0 <= s < 1.

    Returns:
        `CrossEntropySums`; only `loss` is meant to be differentiated.

    Raises:
        ValueError: label_smoothing is out of range.

    >>> sums = jax.jit(output_cross_entropy)(
    ...     jnp.ones((3, 2)), jnp.zeros((2, 4)), None, jnp.array([1, 0, 2]), jnp.full(3, True)
    ... )
    >>> sums.loss.round(4)  # 3 log 4
    Array(4.1589, dtype=float32)

    Source: Szegedy et al. 2016, section 7, for label smoothing (their epsilon is s).
    """
    smoothing = checked_fraction("label_smoothing", label_smoothing)
    dtype = accumulator_dtype(features)
    # XLA:CPU copies the logits of [B, M, D] for the product that is the kernel's gradient.
    features = features.reshape(-1, features.shape[-1])
    targets, real = targets.reshape(-1), real.reshape(-1)
    features = jnp.where(real[:, None], features, 0)  # the gradient 0 * NaN would be NaN
    logits = einsum("md,dv->mv", features, kernel).astype(dtype)
    if bias is not None:
        logits = logits + jnp.broadcast_to(bias.astype(dtype), logits.shape)
    # No logit is above 0 from here on, so that exp cannot overflow.
    logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # The gradient of an indexed read would scatter into an array of zeros.
    is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    exists = (targets >= 0) & (targets < logits.shape[-1])
    target_logit = jnp.where(exists, target_logit, jnp.nan)
    logsumexp = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    nats = logsumexp - target_logit
    mean_logit = jnp.mean(logits, axis=-1)
    smoothed = logsumexp - (1 - smoothing) * target_logit - smoothing * mean_logit
    correct = (target_logit >= 0).astype(dtype)
    return CrossEntropySums(*(jnp.sum(jnp.where(real, x, 0)) for x in (smoothed, nats, correct)))
