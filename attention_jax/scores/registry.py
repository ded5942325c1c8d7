"""Scores by name, for command lines and configurations."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from typing import Any

from attention_jax.scores.additive import Additive, Concat
from attention_jax.scores.contract import Score
from attention_jax.scores.cosine import Cosine
from attention_jax.scores.distance import NegativeSquaredDistance
from attention_jax.scores.dot import Dot, General, ScaledDot
from attention_jax.scores.soft_cap import SoftCap

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

DEFAULT_SCORE = "scaled"  # of every function that takes a score and is given none


def get_score(name_or_score: str | Score | type[Score]) -> Score:
    """The `Score` that a name stands for; a `Score` comes back as it is.

    Args:
        name_or_score: a key of `SCORES`; or "module:Name", a `Score` of your own (class or
            instance) in a module that can be imported; or a `Score`.

    Returns:
        a `Score`, hashable by value.

    Raises:
        ValueError: there is no such score, or its value does not say all that it computes.

    >>> get_score("scaled")
    ScaledDot(scale=None)
    """
    found: Any = name_or_score
    if isinstance(name_or_score, str):
        found = SCORES.get(name_or_score)
        if found is None and ":" in name_or_score:
            found = _import_score(name_or_score)
        elif found is None:
            close = difflib.get_close_matches(name_or_score, SCORES, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"score must be one of {', '.join(SCORES)} or 'module:Name';"
                f" got {name_or_score!r}{hint}"
            )
    if isinstance(found, type) and issubclass(found, Score):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(
                f"score must be an instance where the class needs arguments; got {found.__name__}"
                f" ({error})"
            ) from error
    if not isinstance(found, Score):
        raise ValueError(f"score must be a name or a Score; got {name_or_score!r}")
    _check_value_semantics(found)
    return found


def _check_value_semantics(score: Score) -> None:
    """Compiled functions are cached by the score's value: its fields, which must say everything."""
    name = type(score).__name__
    fields = {field.name for field in dataclasses.fields(score)}
    for value in (getattr(score, field) for field in fields):
        if isinstance(value, Score):  # wrapped
            _check_value_semantics(value)
    for attribute in set(vars(score)) - fields:
        if not isinstance(getattr(type(score), attribute, None), functools.cached_property):
            raise ValueError(
                f"score must be a frozen dataclass; {name}.{attribute} is not a field, so two"
                f" {name} that differ in it would be taken for equal"
            )
    try:
        hash(score)
    except TypeError:
        raise ValueError(
            f"score must be hashable: make {name} a frozen dataclass with hashable fields"
        ) from None


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
