"""`get_score`, which turns a name, a class or a function into a `Score`; and the named `SCORES`."""

import hashlib
import re
from collections.abc import Callable

import jax

from attention_jax.core.checks import check_choice
from attention_jax.core.names import named
from attention_jax.scores.additive import Additive, Concat
from attention_jax.scores.contract import Score, TileCost
from attention_jax.scores.cosine import Cosine
from attention_jax.scores.distance import NegativeSquaredDistance
from attention_jax.scores.dot import Dot, General, ScaledDot
from attention_jax.scores.function import (
    SIGNATURES,
    CallableScore,
    FunctionScore,
    is_callable_pytree,
)
from attention_jax.scores.literature import LITERATURE
from attention_jax.scores.wrapped import SoftCap

# What `get_score` accepts.
ScoreLike = str | Score | type[Score] | Callable[..., jax.Array]

# The scores by name, each with its default settings.
SCORES: dict[str, Score] = {
    "additive": Additive(),
    "concat": Concat(),
    "cosine": Cosine(),
    "distance": NegativeSquaredDistance(),
    "dot": Dot(),
    "general": General(),
    "scaled": ScaledDot(),
    "softcap": SoftCap(),
    **LITERATURE,
}

DEFAULT_SCORE = "scaled"  # the default of every argument `score`
FOUR_SCORES = ("additive", "dot", "general", "scaled")  # of the papers that began with attention


def get_score(name_or_score: ScoreLike) -> Score:
    """The `Score` for a name, a class or a function; a `Score` is returned unchanged.

    A name may have arguments in parentheses, as in "additive(hidden_dim=32)". They replace fields
    of the named score: all are given by keyword, as Python literals, or as scores in the same
    notation where a field is a score. Text is read and never evaluated.

    Args:
        name_or_score: a key of `SCORES`, or "module:Name" for a score in a module that can be
            imported, both with or without arguments; a `Score`; a subclass of `Score` that needs no
            arguments; or a function of (q [t, Dq], k [s, Dk]) or (params, q, k) that returns logits
            [t, s], see `FunctionScore`; or a callable pytree, such as an `nnx.Module`, see
            `CallableScore`. "module:Name" may be a class, an instance or a function;
            arguments make an instance of the class, or a copy of the instance with other fields.

    Returns:
        a `Score`.

    Raises:
        ValueError: there is no score of that name, it does not have these fields, a function takes
            other arguments, or a class has an unknown `tile_cost` or projects both sides at once.

    >>> get_score("scaled")
    ScaledDot(scale=None)
    >>> get_score("softcap(score=additive(hidden_dim=32), cap=20.0)")
    SoftCap(score=Additive(hidden_dim=32), cap=20.0)
    """
    score = named(name_or_score, Score, SCORES, get_score)
    if callable(score) and not isinstance(score, Score | type):
        return (CallableScore if is_callable_pytree(score) else FunctionScore)(score)
    if not isinstance(score, Score):
        raise ValueError(
            f"score must be a name or a Score, or a function of {SIGNATURES}; got {name_or_score!r}"
        )
    name = type(score).__name__
    check_choice(f"tile_cost of {name}", score.tile_cost, TileCost)
    if hasattr(score, "project"):
        raise ValueError(
            f"score must project one side at a time; {name} defines project, which is never called:"
            " define project_query(params, query) and project_key(params, key)"
        )
    return score


def score_folder(text: str) -> str:
    """A name for the folder of runs with the score of this text; other texts have other names.

    >>> score_folder("my_scores:Distance")
    'my_scores-Distance'
    >>> score_folder("additive(hidden_dim=32)")
    'additive-hidden_dim-32-e6cc57cc'
    """
    name = text.replace(":", "-")
    if re.fullmatch(r"[\w.-]+", name):
        return name
    # The words alone would be equal for cap=1 and cap=-1.
    words = re.sub(r"[^\w.]+", "-", name).strip("-")[:80]
    return f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
