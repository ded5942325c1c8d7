"""Limits of attention over random keys; entropy_vs_dimension.py derives them."""

from __future__ import annotations

import math

import numpy as np


def expected_maximum(count: int) -> float:
    """Returns m_n, the expected largest of n standard normal numbers.

    m_n = integral of x n phi(x) Phi(x)^(n-1) dx

    It is also the density at 0 of the gap between the two largest of them,
    integral of n (n-1) phi² Phi^(n-2).
    """
    x = np.linspace(-12, 12, 4801)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-y / math.sqrt(2)) / 2 for y in x])
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))


def mean_inverse_norm(dim: int) -> float:
    """Returns E[1/|q|] = Gamma((d-1)/2) / (sqrt(2) Gamma(d/2)) of a standard normal q, d >= 2."""
    return math.exp(math.lgamma((dim - 1) / 2) - math.lgamma(dim / 2)) / math.sqrt(2)


def scaled_entropy_limit(keys: int) -> float:
    """Returns the expected entropy for logits of variance 1, to first order in 1 / T."""
    return math.log(keys) - 0.5 + (1 + math.e) / (2 * keys)


def raw_entropy_limit(dim: int, keys: int) -> float:
    """Returns the expected entropy for logits of variance d_k, to first order in 1 / sqrt(d_k)."""
    return math.pi**2 / 6 * expected_maximum(keys) * mean_inverse_norm(dim)
