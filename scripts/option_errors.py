"""One line for a wrong word on the command line, in place of tyro's box."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attention_jax.core.names import did_you_mean

# What the help calls the values of an option, in words for one value and for several.
_KINDS = {"INT": ("an integer", "integers"), "FLOAT": ("a number", "numbers")}

# The beginnings of messages about values that do not fit the type of an option. Other messages come
# from this project, and say what was expected and what came.
_OF_TYPES = ("invalid literal for", "could not convert", "no type matching", "Could not find valid")


def option_error(box: str, words: Sequence[str]) -> str:
    """The mistake in `words` as one line, from the box that tyro prints for it.

    Args:
        box: what tyro printed, without line breaks inside sentences.
        words: the words of the command line.
    """
    sections = _sections(box)
    message = " ".join(line.strip() for line in sections[0])
    if found := re.match(r"Error parsing (.+?): (.+)", message):
        return _wrong_value(found[1], found[2], sections, words)
    if found := re.match(r"Missing value for argument '(.+?)'", message):
        return f"{found[1]} must have a value; got none"
    if found := re.match(r"invalid choice '(.*)' for argument '(.+?)'.*one of \((.+)\)", message):
        choices = found[3].replace("'", "").strip(",")
        return f"{found[2]} must be one of {choices}; got {found[1]}"
    if message.startswith("Unrecognized options: "):
        return _unknown_word(message.partition(": ")[2].split(", "), sections, words)
    if message.startswith("Missing from "):
        return _left_out(sections)
    return message


def _sections(box: str) -> list[list[str]]:
    """The lines between the rules of a box, with their indentation and without the title."""
    sections: list[list[str]] = [[]]
    plain = re.sub(r"\x1b\[[\d;]*m", "", box)  # without colours
    for line in plain.splitlines()[1:]:
        inner = line[2:].removesuffix("│").rstrip()
        if inner and set(inner) <= {*"─-╯"}:
            sections.append([])
        elif inner:
            sections[-1].append(inner)
    return [section for section in sections if section] or [[]]


def _wrong_value(option: str, message: str, sections: list[list[str]], words: Sequence[str]) -> str:
    """A value that does not fit the type of its option, or that a check of this project refuses."""
    if not option.startswith("--"):
        return message  # of a check that saw several options
    if not message.startswith(_OF_TYPES):
        name = option.removeprefix("--").replace("-", "_")
        return message if message.startswith(name) else f"{option}: {message}"
    invocation = next((line for lines in sections[1:] for line in lines if option in line), "")
    expected = _in_words(invocation.strip().partition(" ")[2])
    return f"{option} must be {expected}; got {' '.join(_values_of(option, words))}"


def _in_words(metavar: str) -> str:
    """The values that the help of an option names: "an integer or None" for "{None}|INT"."""
    kinds = metavar.strip("[]").partition(" ")[0].split("|")
    several = metavar.startswith("[")
    types = [_KINDS[kind][several] for kind in kinds if kind in _KINDS]
    names = [name for kind in kinds if kind not in _KINDS for name in kind.strip("{}").split(",")]
    *first, last = types + names
    return f"{', '.join(first)} or {last}" if first else last


def _values_of(option: str, words: Sequence[str]) -> list[str]:
    """The words after an option on the command line."""
    values: list[str] = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            rest = words[index + 1 :]
            end = next((i for i, each in enumerate(rest) if each.startswith("--")), len(rest))
            values = [*([value] if equals else []), *rest[:end]]
    return values


def _unknown_word(unknown: list[str], sections: list[list[str]], words: Sequence[str]) -> str:
    """An option that does not exist, or a word that belongs to no option."""
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if options:
        close = [
            line.split()[0].rstrip(",")
            for lines in sections[1:]
            for line in lines
            if re.match(r" {4}--", line)
        ]
        hint = f"; did you mean {close[0]}?" if close else "; --help lists the options"
        return f"there is no option {' or '.join(options)}{hint}"
    before = list(words[: words.index(unknown[0])]) if unknown[0] in words else []
    option = next((word for word in reversed(before) if word.startswith("--")), "")
    where = f" after {option}, which takes {_number_of_values(before, option)}" if option else ""
    return f"unexpected word {unknown[0]!r}{where}"


def _number_of_values(before: list[str], option: str) -> str:
    """How many values an option takes, whose values are the last words of `before`."""
    count = len(before) - 1 - max(i for i, word in enumerate(before) if word == option)
    return {0: "no value", 1: "one value"}.get(count, f"{count} values")


def _left_out(sections: list[list[str]]) -> str:
    """The required options that are missing, each with its help; or a wrong option beside them."""
    names, helps = [], []
    for line in sections[0]:
        if re.match(r" {4}\S", line):
            names.append(line.split()[0])
        elif line.startswith(" " * 8):
            helps.append(line.strip().removesuffix("(required)").strip().rstrip("."))
    for title, *lines in sections[1:]:
        options = [line.strip() for line in lines if line.strip().startswith("--")]
        if title.startswith("Unrecognized options") and options:
            hint = did_you_mean(options[0], names) or f"; {', '.join(names)} must be given"
            return f"there is no option {options[0]}{hint}"
    if len(names) == 1:
        return f"{names[0]} must be given: {helps[0]}" if helps else f"{names[0]} must be given"
    return f"{', '.join(names)} must be given; --help explains them"
