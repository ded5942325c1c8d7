"""Objects that text names, such as a score or a normaliser: frozen dataclasses, by name or module.

The notation is "name", "name(field=value, ...)", "module:Name" or "module:Name(field=value, ...)".
Text is read and never evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from attention_jax.core.did_you_mean import did_you_mean
from attention_jax.core.one_line import one_line
from attention_jax.core.users_code import users_line
from attention_jax.scores.score_text import ScoreText, parse_score


@dataclasses.dataclass(frozen=True)
class Registry:
    """The objects of one kind that text can name.

    Attributes:
        noun: the word for them in errors, which is the name of the argument: "score".
        base: their base class, of frozen dataclasses.
        names: the named objects, with their default settings.
        resolve: turns what a field's text names into an object of the kind.
    """

    noun: str
    base: type
    names: Mapping[str, Any]
    resolve: Callable[[Any], Any]

    def named(self, text: str) -> Any:
        """The object, class or function that a text names.

        Raises:
            ValueError: the text is not in the notation, nothing has this name, or it does not have
                these fields.
        """
        return self._named(parse_score(text, self.noun), text)

    def _named(self, named: ScoreText, text: str) -> Any:
        """The object, class or function that a part of `text` names."""
        found: Any = self.names.get(named.name)
        if found is None and ":" in named.name:
            found = self._import(named.name)
        elif found is None:
            raise ValueError(
                f"{self.noun} must be one of {', '.join(self.names)} or 'module:Name'; got"
                f" {text!r}{did_you_mean(named.name, self.names)}"
            )
        is_class = isinstance(found, type) and issubclass(found, self.base)
        if named.arguments is None and not is_class:
            return found
        if not is_class and not isinstance(found, self.base):
            raise ValueError(
                f"{self.noun} {text!r}: {named.name} takes no arguments in parentheses, since"
                f" it is not a {self.base.__name__} but {found!r}"
            )
        found_class = found if is_class else type(found)
        fields = {field.name: field for field in dataclasses.fields(found_class) if field.init}
        values: dict[str, Any] = {}
        for name, value in (named.arguments or {}).items():
            if name not in fields:
                known = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
                raise ValueError(
                    f"{self.noun} {text!r}: {found_class.__name__} has no field {name!r}; {known}"
                    f"{did_you_mean(name, fields)}"
                )
            values[name] = self._field_value(name, value, text)
        if not is_class:
            return self._made(functools.partial(dataclasses.replace, found), values, text)
        missing = [name for name in required_fields(found_class) if name not in values]
        if missing:
            written = ", ".join(f"{name}=..." for name in required_fields(found_class))
            raise ValueError(
                f"{self.noun} {text!r}: {found_class.__name__} needs {', '.join(missing)}; write"
                f" {named.name}({written})"
            )
        return self._made(found_class, values, text)

    def _field_value(self, field: str, value: Any, text: str) -> Any:
        """A literal, or the object that a part of the text names."""
        if not isinstance(value, ScoreText):
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self.noun} {text!r}: {field} must be hashable, such as a tuple; got"
                    f" {value!r}"
                ) from None
            return value
        name = value.name
        if value.arguments is None and ":" not in name and name not in self.names:
            raise ValueError(
                f"{self.noun} {text!r}: {field} must be a Python literal or a {self.noun}; got"
                f" {name}{did_you_mean(name, self.names)}"
            )
        return self.resolve(self._named(value, text))

    def _made(self, make: Callable[..., Any], values: dict[str, Any], text: str) -> Any:
        """make(**values); ValueError if the class's own checks refuse the values."""
        try:
            return make(**values)
        except Exception as error:
            line = users_line(error)
            if isinstance(error, TypeError | ValueError):
                raise ValueError(f"{self.noun} {text!r}: {one_line(error)}") from error
            if line is None:  # a mistake of ours keeps its traceback
                raise
            raise ValueError(
                f"{self.noun} {text!r}: its constructor raised {type(error).__name__}:"
                f" {one_line(error)} ({line})"
            ) from error

    def _import(self, name: str) -> Any:
        module_name, _, attribute = name.partition(":")
        hint = ""
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            line = users_line(error)
            if line is not None:  # the module exists, and its own code fails
                # The message of a SyntaxError would name the file a second time.
                message = error.msg if isinstance(error, SyntaxError) else one_line(error)
                reason = f"{type(error).__name__}: {message}; {line}"
            elif isinstance(error, ImportError | TypeError | ValueError):
                reason = str(error)
                hint = did_you_mean(module_name, (found.name for found in pkgutil.iter_modules()))
            else:
                raise
            raise ValueError(
                f"{self.noun} {name!r}: cannot import module {module_name!r} ({reason}){hint}"
            ) from error
        if not hasattr(module, attribute):
            raise ValueError(
                f"{self.noun} {name!r}: module {module_name!r} has no {attribute!r}"
                f"{did_you_mean(attribute, vars(module))}"
            )
        return getattr(module, attribute)


def required_fields(cls: type[Any]) -> list[str]:
    """The names of the fields without a default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is missing and field.default_factory is missing
    ]
