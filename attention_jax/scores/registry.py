"""`get_score`, which turns a name, a class or a function into a `Score`; and the named `SCORES`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable
from typing import Any, get_args

import jax

from attention_jax.scores.additive import Additive, Concat
from attention_jax.scores.contract import Score, TileCost
from attention_jax.scores.cosine import Cosine
from attention_jax.scores.distance import NegativeSquaredDistance
from attention_jax.scores.dot import Dot, General, ScaledDot
from attention_jax.scores.function import SIGNATURES, FunctionScore
from attention_jax.scores.soft_cap import SoftCap

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
}

DEFAULT_SCORE = "scaled"  # the default of every argument `score`


def get_score(name_or_score: ScoreLike) -> Score:
    """The `Score` for a name, a class or a function; a `Score` is returned unchanged.

    Args:
        name_or_score: a key of `SCORES`; "module:Name", a score in a module that can be imported; a
            `Score`; a subclass of `Score` that needs no arguments; or a function of (q [t, Dq],
            k [s, Dk]) or (params, q, k) that returns logits [t, s], see `FunctionScore`.

    Returns:
        a `Score`, hashable by value.

    Raises:
        ValueError: there is no score of that name, its fields do not determine what it computes,
            or a function takes other arguments.

    >>> get_score("scaled")
    ScaledDot(scale=None)
    """
    score: Any = name_or_score
    if isinstance(name_or_score, str):
        score = SCORES.get(name_or_score)
        if score is None and ":" in name_or_score:
            score = _import_score(name_or_score)
        elif score is None:
            close = difflib.get_close_matches(name_or_score, SCORES, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"score must be one of {', '.join(SCORES)} or 'module:Name';"
                f" got {name_or_score!r}{hint}"
            )
    if isinstance(score, type) and issubclass(score, Score):
        try:
            score = score()
        except TypeError as error:
            raise ValueError(
                f"score must be an instance where the class needs arguments; got {score.__name__}"
                f" ({error}): write {score.__name__}({_required_arguments(score)})"
            ) from error
    if callable(score) and not isinstance(score, Score | type):
        return FunctionScore(score)
    if not isinstance(score, Score):
        raise ValueError(
            f"score must be a name or a Score, or a function of {SIGNATURES}; got {name_or_score!r}"
        )
    _check_value_semantics(score)
    _check_contract(score)
    return score


def _check_contract(score: Score) -> None:
    """Raises ValueError for an unknown `tile_cost` and for a projection of both sides at once."""
    name, costs = type(score).__name__, get_args(TileCost)
    if score.tile_cost not in costs:
        raise ValueError(
            f"tile_cost of {name} must be one of {', '.join(costs)}; got {score.tile_cost!r}"
        )
    if hasattr(score, "project"):
        raise ValueError(
            f"score must project one side at a time; {name} defines project(params, query, key),"
            " which is never called: define project_query(params, query) and"
            " project_key(params, key)"
        )


def _check_value_semantics(score: Score) -> None:
    """Raises ValueError unless the fields, by which programs are cached, determine the score."""
    name = type(score).__name__
    fields = {field.name for field in dataclasses.fields(score)}
    for value in (getattr(score, field) for field in fields):
        if isinstance(value, Score):  # the score inside a wrapped score
            _check_value_semantics(value)
    for attribute in set(vars(score)) - fields:
        if not isinstance(getattr(type(score), attribute, None), functools.cached_property):
            raise ValueError(
                f"score must be a frozen dataclass; {name}.{attribute} is not a field, so two"
                f" {name} that differ in it would compare equal"
            )
    try:
        hash(score)
    except TypeError:
        raise ValueError(
            f"score must be hashable: make {name} a frozen dataclass with hashable fields"
        ) from None


def _required_arguments(score_class: type[Score]) -> str:
    """The arguments without a default, as they are written in a call."""
    fields = dataclasses.fields(score_class)
    missing = dataclasses.MISSING
    return ", ".join(
        f"{field.name}=..."
        for field in fields
        if field.default is missing and field.default_factory is missing
    )


def _import_score(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"score {name!r}: cannot import module {module_name!r} ({error})"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"score {name!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)
