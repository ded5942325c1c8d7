"""When a head of attention aligns, and when it spreads (topic 7)."""

from __future__ import annotations

import numpy as np

ALIGNS = 0.5  # its rows' largest weights have at least this mean
SPREADS = 0.9  # its rows' mean entropy is at least this share of that of uniform rows


def entropy(weights: np.ndarray) -> np.ndarray:
    """The entropy of rows of weights, in nats."""
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)
