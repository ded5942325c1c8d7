"""Walks over keys as loops in float64: what monotonic weights are compared with."""

import numpy as np


def numpy_weights(p, initial=None):
    """The paper's sum of products as it stands; one example, float64."""
    p = np.asarray(p, np.float64)
    previous = np.eye(p.shape[1])[0] if initial is None else np.asarray(initial, np.float64)
    weights = np.zeros_like(p)
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            weights[i, j] = p[i, j] * sum(
                previous[k] * np.prod(1 - p[i, k:j]) for k in range(j + 1)
            )
        previous = weights[i]
    return weights


def numpy_walk(choices, start=0):
    """Algorithm 1 as a loop: positions, S where it attends to nothing."""
    positions = []
    for row in choices:
        while start < len(row) and not row[start]:
            start += 1
        positions.append(start)
    return positions


def probabilities(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape).astype(np.float32)
