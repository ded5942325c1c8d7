"""Exact tests and intervals for few numbers: shares of seeds, paired steps, medians of turns."""

import math
from collections.abc import Sequence

import numpy as np

LEAST = 6  # numbers, for a 95 % interval of their median


def fisher(first: np.ndarray, second: np.ndarray) -> float:
    """Fisher's exact test of two shares of seeds, two-sided."""
    (a, n), (b, m) = ((int(each.sum()), len(each)) for each in (first, second))
    ways = [math.comb(n, k) * math.comb(m, a + b - k) for k in range(a + b + 1)]
    return sum(way for way in ways if way <= ways[a]) / math.comb(n + m, a + b)


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Wilcoxon's signed-rank test of pairs, two-sided, exact: over all signs of the differences.

    Equal sizes share their mean rank. A difference of 0 has a rank, but no sign (Pratt).
    """
    difference = first - second
    sizes = np.abs(difference)
    ranks = [int(np.sum(sizes < x) + np.sum(sizes <= x) + 1) if x else 0 for x in sizes]  # times 2
    chances = np.ones(1)  # of each sum of signed ranks, from -sum(ranks) to sum(ranks)
    for rank in ranks:
        signs = np.zeros(2 * rank + 1)
        signs[0] += 0.5
        signs[-1] += 0.5
        chances = np.convolve(chances, signs)
    sums = np.abs(np.arange(len(chances)) - sum(ranks))
    return float(chances[sums >= abs(np.sign(difference) @ ranks)].sum())


def rank_sum(first: np.ndarray, second: np.ndarray) -> float:
    """Wilcoxon's rank-sum test, two-sided, exact: over all ways to draw the first numbers.

    Equal numbers, infinite ones among them, share their mean rank.
    """
    both = np.concatenate([first, second])
    ranks = [int(np.sum(both < x) + np.sum(both <= x) + 1) for x in both]  # times 2
    ways = np.zeros((len(first) + 1, sum(ranks) + 1))  # of k numbers with each sum of ranks
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    chances = ways[-1] / ways[-1].sum()
    middle = len(first) * (len(both) + 1)  # times 2
    distances = np.abs(np.arange(len(chances)) - middle)
    return float(chances[distances >= abs(sum(ranks[: len(first)]) - middle)].sum())


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: that of the ranks, where equal numbers share their mean rank.

    It is NaN if all numbers of a sequence are equal.
    """
    a, b = (ranks - ranks.mean() for ranks in map(_ranks, (first, second)))
    squares = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / squares if squares else float("nan")


def _ranks(numbers: Sequence[float]) -> np.ndarray:
    """The rank of each number, from 1; equal numbers have the mean of their ranks."""
    array = np.asarray(numbers, np.float64)
    below = (array[:, None] > array).sum(1)
    return below + ((array[:, None] == array).sum(1) + 1) / 2


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """The p-values with Holm's correction for their number."""
    corrected, least = {}, 0.0
    for index, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - index) * p))
        corrected[name] = least
    return corrected


def ratio_interval(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """The ratio of two medians between the ends of its 95 % interval, by resampled seeds.

    The numbers of a seed are drawn together, 10,000 times. Infinite numbers, never, stay infinite;
    a ratio of two infinite medians has no value and is left out.
    """
    drawn = np.random.default_rng(0).integers(0, len(first), (10_000, len(first)))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.median(first[drawn], axis=1) / np.median(second[drawn], axis=1)
        ratio = float(np.median(first) / np.median(second))
    ordered = np.sort(ratios[~np.isnan(ratios)])
    if not ordered.size:
        return math.nan, math.nan, math.nan
    low, high = (float(ordered[int(len(ordered) * q)]) for q in (0.025, 0.975))
    return low, ratio, high


def median_interval(numbers: np.ndarray) -> tuple[float, float]:
    """The distribution-free 95 % interval of the median of `LEAST` numbers or more.

    The k-th smallest and the k-th largest number are its ends: the median lies below the former
    with the probability that a fair coin of n tosses shows fewer than k heads.
    """
    n, ordered, k = len(numbers), np.sort(numbers), 0
    while 2 * sum(math.comb(n, heads) for heads in range(k + 1)) <= 0.05 * 2**n:
        k += 1
    if k == 0:
        raise ValueError(f"numbers must be {LEAST} or more; got {n}")
    return float(ordered[k - 1]), float(ordered[n - k])
