"""Cases for the statistics of attention, and the same by loops over queries and keys."""

import math

import numpy as np

from attention_jax.analysis import (
    alignment_error,
    attention_summary,
    effective_keys,
    expected_distance,
    jensen_shannon,
    logit_variance,
    normalized_entropy,
    saturation,
    weight_entropy,
)

B, T, S = 2, 5, 7


def rows(*shape, seed=0, sharpness=2.0, dtype=np.float32):
    """Returns random rows that sum to 1."""
    weights = np.exp(sharpness * np.random.default_rng(seed).normal(size=shape))
    return (weights / weights.sum(-1, keepdims=True)).astype(dtype)


WEIGHTS = rows(B, T, S)
WEIGHTS[1, 2] = 0  # a query without keys
WEIGHTS[0, 3] = np.eye(S)[4]
MASK = np.random.default_rng(1).random((B, T, S)) < 0.6
MASK[0, 0] = [False, True, *[False] * (S - 2)]  # one key
MASK[1, 4] = False  # none
COUNTED = np.array([[True, False, True, True, True], [False, True, True, True, True]])
ALIGNMENT = np.array([[3, 0, S, 4, 6], [-1, 2, 5, 1, 1]])  # S and -1 are out of range


def entropy_by_hand(row):
    return sum(-w * math.log(w) for w in np.asarray(row, np.float64) if w > 0)


def normalized_by_hand(row, allowed):
    entropy = entropy_by_hand([w for w, may in zip(row, allowed, strict=True) if may])
    return entropy / math.log(sum(allowed)) if sum(allowed) > 1 else 0


def divergence_by_hand(a_row, b_row):
    total = 0
    for a, b in zip(np.float64(a_row), np.float64(b_row), strict=True):
        total += a * math.log(2 * a / (a + b)) / 2 if a > 0 else 0
        total += b * math.log(2 * b / (a + b)) / 2 if b > 0 else 0
    return total


def by_row(function, *arrays):
    shape = arrays[0].shape[:-1]
    return np.array([function(*(a[i] for a in arrays)) for i in np.ndindex(shape)]).reshape(shape)


def mean_by_hand(of_query, weights, counted):
    """Returns the mean of `of_query(b, i)` over counted queries that have a key."""
    means = []
    for b in range(len(weights)):
        queries = [i for i in range(weights.shape[1]) if counted[b, i] and weights[b, i].any()]
        values = [of_query(b, i) for i in queries]
        values = [value for value in values if value is not None]
        means.append(sum(values) / len(values) if values else 0)
    return np.array(means)


def error_by_hand(weights, alignment, counted):
    def error(b, i):
        key = alignment[b, i]
        return 1 - float(weights[b, i, key]) if 0 <= key < weights.shape[-1] else None

    return mean_by_hand(error, weights, counted)


def distance_by_hand(weights, alignment, counted):
    def distance(b, i):
        key = alignment[b, i]
        if not 0 <= key < weights.shape[-1]:
            return None
        return sum(float(w) * abs(j - key) for j, w in enumerate(weights[b, i]))

    return mean_by_hand(distance, weights, counted)


def variance_by_hand(logits, allowed):
    pairs = [float(x) for x, may in zip(logits.ravel(), allowed.ravel(), strict=True) if may]
    if not pairs:
        return 0
    mean = sum(pairs) / len(pairs)
    return sum((x - mean) ** 2 for x in pairs) / len(pairs)


# Name -> function of weights, mask, rows and alignment.
FUNCTIONS = {
    "weight_entropy": lambda w, m, r, a: weight_entropy(w),
    "normalized_entropy": lambda w, m, r, a: normalized_entropy(w, m),
    "effective_keys": lambda w, m, r, a: effective_keys(w),
    "saturation": lambda w, m, r, a: saturation(w, bound=0.5, rows=r),
    "logit_variance": lambda w, m, r, a: logit_variance(w, m),
    "logit_variance of rows": lambda w, m, r, a: logit_variance(w, m, per_row=True),
    "alignment_error": lambda w, m, r, a: alignment_error(w, a, rows=r),
    "expected_distance": lambda w, m, r, a: expected_distance(w, a, rows=r),
    "jensen_shannon": lambda w, m, r, a: jensen_shannon(w, w[..., ::-1]),
    "attention_summary": lambda w, m, r, a: attention_summary(
        w, mask=m, rows=r, alignment=a, bound=0.5
    ),
}
