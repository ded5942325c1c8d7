"""`get_score`, which turns a name, a class or a function into a `Score`; and the named `SCORES`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, get_args

import jax

from attention_jax.core.one_line import one_line
from attention_jax.core.users_code import users_line
from attention_jax.scores.additive import Additive, Concat
from attention_jax.scores.contract import Score, TileCost
from attention_jax.scores.cosine import Cosine
from attention_jax.scores.distance import NegativeSquaredDistance
from attention_jax.scores.dot import Dot, General, ScaledDot
from attention_jax.scores.function import SIGNATURES, FunctionScore
from attention_jax.scores.score_text import ScoreText, parse_score
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

    A name may have arguments in parentheses, as in "additive(hidden_dim=32)". They replace fields
    of the named score: all are given by keyword, as Python literals, or as scores in the same
    notation where a field is a score. Text is read and never evaluated.

    Args:
        name_or_score: a key of `SCORES`, or "module:Name" for a score in a module that can be
            imported, both with or without arguments; a `Score`; a subclass of `Score` that needs no
            arguments; or a function of (q [t, Dq], k [s, Dk]) or (params, q, k) that returns logits
            [t, s], see `FunctionScore`. "module:Name" may be a class, an instance or a function;
            arguments make an instance of the class, or a copy of the instance with other fields.

    Returns:
        a `Score`, hashable by value.

    Raises:
        ValueError: there is no score of that name, it does not have these fields, its fields do not
            determine what it computes, or a function takes other arguments.

    >>> get_score("scaled")
    ScaledDot(scale=None)
    >>> get_score("softcap(score=additive(hidden_dim=32), cap=20.0)")
    SoftCap(score=Additive(hidden_dim=32), cap=20.0)
    """
    score: Any = name_or_score
    if isinstance(name_or_score, str):
        score = _score_of_text(parse_score(name_or_score), name_or_score)
    elif isinstance(score, type) and issubclass(score, Score):
        try:
            score = score()
        except TypeError as error:
            written = ", ".join(f"{name}=..." for name in _required(score))
            raise ValueError(
                f"score must be an instance where the class needs arguments; got {score.__name__}"
                f" ({error}): write {score.__name__}({written})"
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


# --- scores that are named by text ---


def _score_of_text(named: ScoreText, text: str) -> Any:
    """The score, or the function, that a part of `text` names."""
    found: Any = SCORES.get(named.name)
    if found is None and ":" in named.name:
        found = _import_score(named.name)
    elif found is None:
        raise ValueError(
            f"score must be one of {', '.join(SCORES)} or 'module:Name'; got"
            f" {text!r}{_hint(named.name, SCORES)}"
        )
    is_class = isinstance(found, type) and issubclass(found, Score)
    if named.arguments is None and not is_class:
        return found
    if not is_class and not isinstance(found, Score):
        raise ValueError(
            f"score {text!r}: {named.name} takes no arguments in parentheses, since it is not a"
            f" Score but {found!r}"
        )
    score_class = found if is_class else type(found)
    fields = {field.name: field for field in dataclasses.fields(score_class) if field.init}
    values: dict[str, Any] = {}
    for name, value in (named.arguments or {}).items():
        if name not in fields:
            known = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
            raise ValueError(
                f"score {text!r}: {score_class.__name__} has no field {name!r}; {known}"
                f"{_hint(name, fields)}"
            )
        values[name] = _field_value(name, value, text)
    if not is_class:
        return _made(functools.partial(dataclasses.replace, found), values, text)
    missing = [name for name in _required(score_class) if name not in values]
    if missing:
        written = ", ".join(f"{name}=..." for name in _required(score_class))
        raise ValueError(
            f"score {text!r}: {score_class.__name__} needs {', '.join(missing)}; write"
            f" {named.name}({written})"
        )
    return _made(score_class, values, text)


def _field_value(field: str, value: Any, text: str) -> Any:
    """A literal, or the score that a part of the text names."""
    if not isinstance(value, ScoreText):
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"score {text!r}: {field} must be hashable, such as a tuple; got {value!r}"
            ) from None
        return value
    name = value.name
    if value.arguments is None and ":" not in name and name not in SCORES:
        raise ValueError(
            f"score {text!r}: {field} must be a Python literal or a score; got"
            f" {name}{_hint(name, SCORES)}"
        )
    return get_score(_score_of_text(value, text))


def _made(make: Callable[..., Score], values: dict[str, Any], text: str) -> Score:
    """make(**values); ValueError if the score's own checks refuse the values."""
    try:
        return make(**values)
    except Exception as error:
        line = users_line(error)
        if isinstance(error, TypeError | ValueError):
            raise ValueError(f"score {text!r}: {one_line(error)}") from error
        if line is None:  # a mistake of ours keeps its traceback
            raise
        raise ValueError(
            f"score {text!r}: its constructor raised {type(error).__name__}: {one_line(error)}"
            f" ({line})"
        ) from error


def _import_score(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        line = users_line(error)
        if line is not None:  # the module exists, and its own code fails
            reason = f"{type(error).__name__}: {one_line(error)}; {line}"
        elif isinstance(error, ImportError | TypeError | ValueError):
            reason = str(error)
        else:
            raise
        raise ValueError(
            f"score {name!r}: cannot import module {module_name!r} ({reason})"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"score {name!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


# --- checks ---


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


def _required(score_class: type[Score]) -> list[str]:
    """The names of the fields without a default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(score_class)
        if field.init and field.default is missing and field.default_factory is missing
    ]
