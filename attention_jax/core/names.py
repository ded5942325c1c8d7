"""Frozen dataclasses, such as scores and normalisers, that a text names or config.json describes.

A text is "name" or "module:Name", or either with fields: "name(field=value, ...)". A value is a
Python literal, or such a text where the field is such an object. Text is read and never evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from attention_jax.core.digests import ADDRESS
from attention_jax.core.programs import Known, module_of, one_line, users_line
from attention_jax.core.samples import same_numbers

JSON = dict[str, Any]
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


# --- what config.json stores of an object ---


def describe(part: Any) -> JSON:
    """The class and fields of a score or normaliser; of a user's, also its program.

    The program is a digest, which knows it exactly, that of `init`, and numbers that it gives, by
    which a program that was written anew is compared.

    Args:
        part: a part of this library, or a user's that is `Known`.

    >>> from attention_jax.scores import get_score
    >>> describe(get_score("scaled(scale=0.5)"))
    {'class': 'attention_jax.scores.ScaledDot', 'fields': 'ScaledDot(scale=0.5)'}
    """
    return _identity(part) | ({"numbers": part.sample()} if type(part) is Known else {})


def _identity(part: Any) -> JSON:
    cls = part.__class__
    fields = ADDRESS.sub("", repr(part))
    description = {"class": f"{module_of(cls)}.{cls.__qualname__}", "fields": fields}
    if type(part) is Known:
        digests = {"program": part.digest, "init": part.trace_init()}
        description |= digests | {"jax": jax.__version__}
    return description


def check_description(setting: str, part: Any, stored: JSON) -> None:
    """Raises ValueError unless `part` is what `describe` made `stored` of.

    A part of a user is the same if its program is, whatever its class and fields are called. If its
    program is another and gives the same numbers, it counts as the same, with a warning. Earlier
    versions of this library stored neither numbers nor `init`: there another program is refused, or
    a warning if it may be because of the version of JAX.

    Args:
        setting: how the part was named, for the error.
        part: as in `describe`.
        stored: from config.json.
    """
    now = _identity(part)
    changed = {name for name in now if stored.get(name) != now[name]}
    if "numbers" not in stored:
        changed -= {"init"}
    if not changed or ("program" in now and changed.isdisjoint(("program", "init"))):
        return
    text = f"{setting} was {_words(stored)} when this run was trained, and is {_words(now)} now"
    if "numbers" not in stored and changed == {"program", "jax"}:
        versions = f"jax was {stored.get('jax')} then, and is {now['jax']} now"
        warnings.warn(f"{text}; this may be because {versions}", stacklevel=2)
        return
    if "numbers" in stored and "program" in now:
        if same_numbers(stored["numbers"], part.sample()):
            warnings.warn(f"{text}, which gives the same numbers", stacklevel=2)
            return
        text += ", which gives other numbers"
    raise ValueError(
        f"{text}; restore what the run was trained with, or train a new run in another folder"
    )


def _words(description: JSON) -> str:
    program = f", program {str(description['program'])[:12]}" if "program" in description else ""
    return f"{description.get('fields')} (class {description.get('class')}{program})"
