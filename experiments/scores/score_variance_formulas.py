"""Formulas of score_variance.py: variances of logits of normalised tokens, and of additive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NORMALISATIONS = ("none", "rms", "layer")


def variances_by_formula(
    means: Sequence[np.ndarray], deviations: Sequence[float], normalisation: str
) -> dict[str, float]:
    """Returns the variance of q . k / sqrt(D) over all pairs and within a row.

    Tokens divided by their root mean square have features of mean square 1, in the limit of large
    D; the means contribute the shares a (query) and b (key). Across the direction of the mean their
    variance is 1 - a. Along it the variance is smaller, since the length no longer varies:

        (1 - a) ((1 - a)^2 + a (1 - a) / 2) = (1 - a)^2 (1 - a / 2),

    where the last 1 / 2 is the variance of the length of a vector from N(0, 1).

    Args:
        means: of the query's and of the key's features, [D] each.
        deviations: of the query's and of the key's features.
        normalisation: one of `NORMALISATIONS`.
    """
    if normalisation == "layer":
        means = [mean - mean.mean() for mean in means]
    squares = [np.mean(mean**2) for mean in means]
    query_variance, key_variance = (deviation**2 for deviation in deviations)
    if normalisation == "none":
        row = key_variance * (query_variance + squares[0])
        return {"pairs": row + query_variance * squares[1], "row": row}
    a = squares[0] / (squares[0] + query_variance)
    b = squares[1] / (squares[1] + key_variance)
    aligned = 0.0  # cos^2 of the angle between the means
    if a > 0 and b > 0:
        aligned = np.mean(means[0] * means[1]) ** 2 / (squares[0] * squares[1])

    def along_the_other_mean(share: float) -> float:
        return (1 - share) * (aligned * (1 - share) * (1 - share / 2) + 1 - aligned)

    row = (1 - a) * (1 - b) + a * along_the_other_mean(b)
    return {"pairs": row + b * along_the_other_mean(a), "row": row}


def additive_row_variance(nodes: int = 64) -> float:
    """Returns additive's variance within a row at initialisation, for large D.

    1 - E_a[(E_b tanh(a + b))^2] / E[tanh^2], where a = Wq q and b = Wk k are N(0, 1/2) each; by
    Gauss-Hermite quadrature.
    """
    points, weights = np.polynomial.hermite.hermgauss(nodes)  # of exp(-x^2): N(0, 1/2)
    weights = weights / weights.sum()
    tanh = np.tanh(points[:, None] + points[None, :])
    of_query = tanh @ weights
    return float(1 - weights @ of_query**2 / (weights @ tanh**2 @ weights))
