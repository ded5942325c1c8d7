"""Accuracies over real tokens, and means over seeds."""

import math
import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.training.losses import real_tokens

Array = jax.Array


def share(true: Array, among: Array | None = None, axis: int | None = None) -> Array:
    """The share of booleans that are true, as a quotient of counts; float32, 0 of none.

    `jnp.mean` multiplies by the rounded inverse: of 41, all would be 0.99999994.

    Args:
        true: bool, any shape.
        among: bool, broadcastable to it: which are counted; None for all.
        axis: over which to count; None for all axes.

    >>> share(jnp.array([True, False, True, False]), jnp.array([True, True, True, False]))
    Array(0.6666667, dtype=float32)
    """
    counted = True if among is None else among
    # XLA would multiply by the inverse of a number of elements that it knows, as `jnp.mean` does.
    right, wrong = (jnp.sum(each & counted, axis=axis) for each in (true, ~true))
    return right.astype(jnp.float32) / jnp.maximum(right + wrong, 1).astype(jnp.float32)


def token_accuracy(predictions: Array, targets: Array, target_lengths: Array) -> Array:
    """Share of the real target tokens that are predicted correctly; float32 [].

    Args:
        predictions: int [B, T].
        targets: int [B, T].
        target_lengths: int [B].

    >>> token_accuracy(jnp.array([[3, 4, 9]]), jnp.array([[3, 5, 9]]), jnp.array([2]))
    Array(0.5, dtype=float32)
    """
    return share(predictions == targets, real_tokens(target_lengths, targets.shape[1]))


def exact_match(predictions: Array, targets: Array, target_lengths: Array) -> Array:
    """Share of the rows whose real target tokens are all predicted correctly; float32 [].

    With EOS among the real tokens, a row matches only if it also ends at the correct position.

    >>> exact_match(jnp.array([[3, 4], [3, 9]]), jnp.array([[3, 4], [3, 5]]), jnp.array([2, 2]))
    Array(0.5, dtype=float32)
    """
    real = real_tokens(target_lengths, targets.shape[1])
    return share(jnp.all(~real | (predictions == targets), axis=1))


def finite_mean(by_seed: Sequence[float]) -> float:
    """The mean over the seeds whose number is finite; NaN if there is no such seed.

    >>> finite_mean([1.0, math.nan, 2.0])
    1.5
    """
    finite = [*filter(math.isfinite, by_seed)]
    return statistics.fmean(finite) if finite else math.nan


def mean_and_deviation(by_seed: np.ndarray | Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation over the last axis, the seeds; NaN for a single seed.

    >>> [float(x) for x in mean_and_deviation([1.0, 2.0, 3.0])]
    [2.0, 1.0]
    """
    values = np.asarray(by_seed)
    seeds = values.shape[-1]
    mean = values.mean(axis=-1)
    return mean, values.std(axis=-1, ddof=1) if seeds > 1 else np.full_like(mean, np.nan)


def mean_interval(
    by_seed: np.ndarray | Sequence[float], low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds: mean ± t s / sqrt(n), cut off at `low` and `high`.

    t is the 97.5 % quantile of Student's t with n - 1 degrees of freedom, s the sample standard
    deviation. The true mean lies between `low` and `high`, so that cutting loses no coverage. Equal
    numbers have an interval without width, which is no proof that other seeds would agree.

    Args:
        by_seed: float [n].
        low: the smallest number that a seed can have.
        high: the largest number that a seed can have.

    Returns:
        Both ends; NaN for a single seed, which has no interval, or if a number is not finite.

    >>> [round(end, 2) for end in mean_interval([97.0, 98.0, 99.0], 0, 100)]
    [95.52, 100.0]
    """
    if len(by_seed) < 2 or not np.all(np.isfinite(by_seed)):
        return math.nan, math.nan
    mean, deviation = map(float, mean_and_deviation(by_seed))
    half = student_t(len(by_seed) - 1) * deviation / math.sqrt(len(by_seed))
    return float(max(low, mean - half)), float(min(high, mean + half))


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4: P(|T| < t)
    with t = sqrt(freedom) tan(angle) is a finite sum, which is solved for 0.95 by bisection.

    Args:
        freedom: the degrees of freedom, at least 1.

    >>> [round(student_t(freedom), 3) for freedom in (1, 2, 9)]
    [12.706, 4.303, 2.262]
    """

    def probability(angle: float) -> float:
        is_odd, sin, cos = freedom % 2, math.sin(angle), math.cos(angle)
        term, total = cos**is_odd, 0.0
        for power in range(is_odd, freedom, 2):
            total += term
            term *= (power + 1) / (power + 2) * cos**2
        return 2 / math.pi * (angle + sin * total) if is_odd else sin * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
