"""The class and fields of a score or normaliser as JSON, by which a run recognises its own."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from typing import Any

JSON = dict[str, Any]


def describe(part: Any) -> JSON:
    """The class and all fields of a score or normaliser, nested ones included, as JSON.

    Functions and classes are described by their qualified names: a function with a new body has the
    same description, and so has a class with a new method.

    >>> from attention_jax.scores import get_score
    >>> describe(get_score("scaled(scale=0.5)"))
    {'class': 'attention_jax.scores.ScaledDot', 'fields': {'scale': 0.5}}
    """
    described: JSON = _described(part)
    return described


def fits_description(part: Any, stored: Any) -> bool:
    """Whether `describe` would have made `stored` of this score or normaliser.

    A field that is newer than the description must have its default.
    """
    if not _is_dataclass(part) or not isinstance(stored, dict):
        return bool(_described(part) == stored)
    if stored["class"] != _qualified_name(type(part)):
        return False
    fields = {field.name: field for field in dataclasses.fields(part) if field.compare}
    if not stored["fields"].keys() <= fields.keys():
        return False
    for name, field in fields.items():
        value = getattr(part, name)
        fits = (
            fits_description(value, stored["fields"][name])
            if name in stored["fields"]
            else value == _default_of(field)
        )
        if not fits:
            return False
    return True


def description_in_words(described: Any, *, modules: bool = False) -> str:
    """A description as Python would print it; with the modules of classes, if asked."""
    if not (isinstance(described, dict) and described.keys() == {"class", "fields"}):
        return repr(described)
    name = described["class"] if modules else described["class"].rpartition(".")[2]
    fields = (
        f"{field}={description_in_words(value, modules=modules)}"
        for field, value in described["fields"].items()
    )
    return f"{name}({', '.join(fields)})"


def _described(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)  # JSON has no NaN, and NaN != NaN
    if isinstance(value, tuple | list):
        return [_described(item) for item in value]
    if isinstance(value, frozenset):
        return sorted((_described(item) for item in value), key=json.dumps)
    if isinstance(value, enum.Enum):
        return f"{_qualified_name(type(value))}.{value.name}"
    if isinstance(value, functools.partial):
        keywords = {name: _described(item) for name, item in value.keywords.items()}
        arguments = [_described(item) for item in value.args]
        fields = {"func": _described(value.func), "args": arguments, "keywords": keywords}
        return {"class": "functools.partial", "fields": fields}
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        fields = {name: _described(getattr(value, name)) for name in names}
        return {"class": _qualified_name(type(value)), "fields": fields}
    if hasattr(value, "__qualname__"):
        return _qualified_name(value)
    # The address of an object differs between processes.
    return _qualified_name(type(value)) if " at 0x" in repr(value) else repr(value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _qualified_name(named: Any) -> str:
    module = str(named.__module__)
    for room in ("attention_jax.scores", "attention_jax.normalizers"):
        if module.startswith(f"{room}."):  # runs outlive a move within the library
            module = room
    return f"{module}.{named.__qualname__}"


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
