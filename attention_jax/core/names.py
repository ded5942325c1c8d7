"""Frozen dataclasses, such as scores and normalisers, that a text names.

A text is "name" or "module:Name", or either with fields: "name(field=value, ...)". A value is a
Python literal, or such a text where the field is such an object. Text is read and never evaluated.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attention_jax.core.errors import one_line, users_line

_COLON = "ː"  # Python counts this character as a letter, so it reads moduleːName as one name


def named(given: Any, base: type, names: Mapping[str, Any], get: Callable[[str], Any]) -> Any:
    """The object that a text or a class stands for; anything else is returned unchanged.

    Args:
        given: a text, a subclass of `base`, or anything else.
        base: the class of the objects, a frozen dataclass.
        names: the objects that have a name, with their default settings.
        get: turns the text of a field's value into an object.

    Returns:
        an instance of `base`, or what "module:Name" names if it is no instance or subclass.

    Raises:
        ValueError: in one line: the text is not in the notation, nothing has this name, the object
            does not have these fields, or it refuses their values.
    """
    noun, fields, found = base.__name__.lower(), None, given
    if isinstance(given, str):
        name, fields = name_and_fields(given, noun, names, get)
        found = names[name] if name in names else imported(name, given, noun, names)
    is_class = isinstance(found, type) and issubclass(found, base) and found is not base
    if fields is None and not is_class:
        return found
    if not is_class and not isinstance(found, base):
        raise ValueError(
            f"{noun} {given!r} must have no parentheses: {found!r} is no {base.__name__}"
        )
    make = found if is_class else functools.partial(dataclasses.replace, found)
    try:
        return make(**(fields or {}))
    except (TypeError, ValueError) as error:
        message = f"{noun} {given!r}: {one_line(error)}"
        if isinstance(error, TypeError):  # a field is unknown or missing
            known = [field.name for field in dataclasses.fields(found) if field.init]
            message += f"; its fields are {', '.join(known)}" if known else "; it has no fields"
        raise ValueError(message) from error


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name; "" if no known name is spelled like it.

    >>> did_you_mean("aditive", ["additive", "dot"])
    "; did you mean 'additive'?"
    >>> did_you_mean("majority", ["sort", "reversal"])
    ''
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def name_and_fields(
    text: str, noun: str, names: Mapping[str, Any], get: Callable[[str], Any]
) -> tuple[str, dict[str, Any] | None]:
    """The name in a text, and the values of its fields; None without parentheses."""
    if "(" not in text:
        return text, None
    python = re.sub(r"(?<=\w):(?=\w)", _COLON, text.strip())
    try:
        call: Any = ast.parse(python, mode="eval").body
        nodes = {keyword.arg: keyword.value for keyword in call.keywords}
        is_call = not call.args and None not in nodes and len(nodes) == len(call.keywords)
    except (AttributeError, SyntaxError, ValueError, RecursionError, MemoryError):
        is_call = False
    if not is_call:
        raise ValueError(
            f"{noun} must be name(field=value, ...) or module:Name(field=value, ...), with each"
            f" field given once; got {text!r}"
        )

    def written(node: ast.expr) -> str:
        return str(ast.get_source_segment(python, node)).replace(_COLON, ":")

    def value_of(field: str, text_of_value: str) -> Any:
        name = text_of_value.partition("(")[0].strip()
        if name in names or re.fullmatch(r"[\w.]+:\w+", name):
            return get(text_of_value)
        try:
            value = ast.literal_eval(text_of_value)
            hash(value)
            return value
        except (SyntaxError, TypeError, ValueError) as error:
            raise ValueError(
                f"{noun} {text!r}: {field} must be a hashable Python literal or a {noun}; got"
                f" {text_of_value}{did_you_mean(name, names)}"
            ) from error

    return written(call.func), {
        field: value_of(field, written(node)) for field, node in nodes.items()
    }


def imported(name: str, text: str, noun: str, names: Mapping[str, Any]) -> Any:
    """The attribute of a module that "module:Name" names."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"{noun} must be one of {', '.join(names)} or 'module:Name'; got"
            f" {text!r}{did_you_mean(name, names)}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        line, file = users_line(error), module_name.removesuffix(".py")
        hint = "" if file == module_name else f": drop .py, as in '{file}:{attribute}'"
        raise ValueError(
            f"{noun} {text!r}: cannot import module {module_name!r} ({type(error).__name__}:"
            f" {one_line(error)}{f'; {line}' if line else ''}){hint}"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(
            f"{noun} {text!r}: module {module_name!r} has no {attribute!r}"
            f"{did_you_mean(attribute, vars(module))}"
        )
    return getattr(module, attribute)


def of_field(field: str, name: str) -> Any:
    """A property: the attribute or method `name` of the object in a field."""
    return property(lambda self: getattr(getattr(self, field), name), doc=f"`{name}` of `{field}`.")


# --- which classes are of this library ---


def is_of_library(part: Any) -> bool:
    """Whether a part and all parts in its fields are classes of this library, equal by value."""
    # What wraps a part has the class of the part.
    parts = ((type(each), each.__class__) for each in nested_parts(part))
    return all(cls is claimed and is_of_this_package(cls) for cls, claimed in parts)


def nested_parts(part: Any) -> list[Any]:
    """A part, the parts and functions in its fields, and those in theirs."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = (getattr(part, field.name, None) for field in fields)
    return [part, *(each for value in values if callable(value) for each in nested_parts(value))]


def is_of_this_package(cls: Any) -> bool:
    """Whether a class or a function is defined in this library."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def module_of(cls: type) -> str:
    """The module of a class; of one of this library its room, because runs outlive a move in it."""
    return ".".join(cls.__module__.split(".")[:2]) if is_of_this_package(cls) else cls.__module__
