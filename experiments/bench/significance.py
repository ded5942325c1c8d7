"""Exact tests and intervals for few seeds: shares of them, and paired steps."""

from __future__ import annotations

import itertools
import math

import numpy as np


def differ(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two shares of seeds differ: Fisher's exact test, two-sided, p < 0.05."""
    (a, n), (b, m) = ((int(each.sum()), len(each)) for each in (first, second))
    ways = [math.comb(n, k) * math.comb(m, a + b - k) for k in range(a + b + 1)]
    return sum(way for way in ways if way <= ways[a]) < 0.05 * math.comb(n + m, a + b)


def interval(solved: np.ndarray) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    n, share, z = len(solved), float(np.mean(solved)), 1.96
    middle, half = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / 2 / n) ** 2)
    return (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Wilcoxon's signed-rank test of pairs, two-sided, exact: over all signs of the differences."""
    difference = first - second
    sizes = np.abs(difference)
    ranks = np.array([(np.sum(sizes < x) + np.sum(sizes <= x) + 1) / 2 for x in sizes]) * (
        sizes > 0
    )
    signs = np.array([*itertools.product((-1, 1), repeat=len(ranks))])
    sums = np.abs(signs @ ranks)
    return float(np.mean(sums >= abs(np.sign(difference) @ ranks) - 1e-9))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """The p-values with Holm's correction for their number."""
    corrected, least = {}, 0.0
    for index, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - index) * p))
        corrected[name] = least
    return corrected
