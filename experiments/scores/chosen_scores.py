"""The scores that an experiment compares, each named by a text as in `get_score`."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from attention_jax.scores import Params, get_score, known_score


def check_scores(scores: Sequence[str], *dims: int) -> None:
    """Raises ValueError unless `scores` names one or more scores, none of them twice.

    Each score must work for queries and keys of each number of features in `dims`.
    """
    if not scores:
        raise ValueError("scores must be at least one; got none")
    if len(set(scores)) < len(scores):
        raise ValueError(f"scores must be different; got {', '.join(scores)}")
    for score in scores:
        for dim in dims:
            known_score(get_score(score), None, dim, dim)


def fresh_params(score: str, rng: jax.Array, dim: int) -> Params:
    """Returns new parameters of a score for queries and keys of `dim` features."""
    return get_score(score).init(rng, dim, dim)
