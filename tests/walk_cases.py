"""Monotonic attention as loops over keys in float64."""

import numpy as np


def numpy_weights(p, initial=None):
    """Returns the weights of one example by the paper's sum of products."""
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
    """Returns positions by algorithm 1, as a loop; S where a query attends to nothing."""
    positions = []
    for row in choices:
        while start < len(row) and not row[start]:
            start += 1
        positions.append(start)
    return positions


def probabilities(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape).astype(np.float32)
