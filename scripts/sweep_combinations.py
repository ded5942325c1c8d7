"""The combinations of a sweep: products of scores and settings, parsed by scripts/train.py."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import train

from attention_jax.core.names import did_you_mean
from attention_jax.tasks import task_of

# Options of scripts/train.py that a sweep sets itself, or cannot have.
_NOT_OPTIONS = {
    "score": "give the scores to --scores",
    "distributed": "a sweep trains in one process",
    "coordinator": "a sweep trains in one process",
    "process_count": "a sweep trains in one process",
    "process_index": "a sweep trains in one process",
}


class Combination(NamedTuple):
    """One score with one value of every setting."""

    label: str  # "additive, dim 32"
    arguments: Any  # `train.Arguments`; its workdir is the folder of this run


def combinations_of(
    task: str,
    scores: Sequence[str],
    settings: Sequence[str],
    workdir: Path,
    common: Sequence[str],
) -> list[Combination]:
    """The product of the scores and of all values of all settings, the last setting fastest.

    Args:
        task: a name in `TASKS`, or "module:Name".
        scores: what --score of scripts/train.py takes.
        settings: "NAME=VALUE,VALUE" each.
        workdir: the folder of all run folders.
        common: options of scripts/train.py for all combinations.

    Raises:
        ValueError: one line for the first mistake in any of the combinations.
    """
    if not scores:
        raise ValueError("scores must be one or more; got none")
    options = option_types(task_of(task))
    by_name: dict[str, Sequence[Sequence[str]]] = {}
    for text in settings:
        name, values = _parsed_setting(text, options)
        if name in by_name:
            raise ValueError(f"set must name {name} once; got it twice")
        by_name[name] = values
    _check_common(common, by_name)
    combinations = []
    for score in scores:
        for chosen in itertools.product(*by_name.values()):
            words = ["--task", task, "--workdir", str(workdir), "--score", score, *common]
            words += itertools.chain.from_iterable(chosen)
            named = ", ".join([score, *(" ".join(option).removeprefix("--") for option in chosen)])
            combinations.append(_combination(words, named, list(by_name), workdir))
    folders = [combination.arguments.workdir for combination in combinations]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise ValueError(f"two combinations are the same: {combinations[index].label}")
    return combinations


def option_types(config_class: Any) -> dict[str, Any]:
    """The type of each setting of a task that is an option of scripts/train.py, by its name."""
    hints = typing.get_type_hints(config_class)
    options: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        options |= option_types(kind) if dataclasses.is_dataclass(kind) else {field.name: kind}
    return options


def options_of(config: Any) -> dict[str, Any]:
    """The value of each such setting."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            settings |= options_of(value)
        else:
            settings[field.name] = str(value) if isinstance(value, Path) else value
    return settings


def _combination(words: list[str], named: str, names: list[str], workdir: Path) -> Combination:
    try:
        arguments = command_line.parse(train.arguments_of, words)
    except ValueError as error:
        if not command_line.is_users_mistake(error):
            raise
        raise ValueError(f"combination {named}: {error}") from error
    settings = options_of(arguments.settings)
    # In the order of the settings, whatever the order of the command line: the folder is the same.
    values = {name: settings[name] for name in settings if name in names}
    score = settings["score"]
    label = ", ".join([score, *(f"{name} {value}" for name, value in values.items())])
    folder = workdir / folder_name(score, values)
    return Combination(label, dataclasses.replace(arguments, workdir=folder))


def folder_name(score: str, values: Mapping[str, Any]) -> str:
    """A file name for a combination, different for different combinations.

    >>> folder_name("additive", {"dim": 32, "learning_rate": 1e-3})
    'additive,dim=32,learning_rate=0.001'
    """
    text = ",".join([score, *(f"{name}={value}" for name, value in values.items())])
    safe = re.sub(r"[^\w.,=+-]+", "-", text, flags=re.ASCII)
    if safe == text and len(text) <= 100 and not text.startswith((".", "-")):
        return text
    # The digest keeps apart what would be the same without the replaced or cut letters.
    readable = safe.strip(".-")[:90] or "score"
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# --- NAME=VALUE,VALUE ---


def _parsed_setting(text: str, options: Mapping[str, Any]) -> tuple[str, list[list[str]]]:
    """The name of a setting, and the words of the command line for each of its values."""
    path, equals, values = text.partition("=")
    name = path.split(".")[-1].replace("-", "_")
    if not equals or not name:
        raise ValueError(f"set must be NAME=VALUE,VALUE; got {text!r}")
    _check_name("set", name, options)
    return name, [_option_words(name, value, options[name]) for value in _split(name, values)]


def _check_name(option: str, name: str, options: Mapping[str, Any]) -> None:
    if name in _NOT_OPTIONS:
        raise ValueError(f"{option} must not name {name}: {_NOT_OPTIONS[name]}")
    if name not in options:
        raise ValueError(
            f"{option} must name a setting of the task, an option of scripts/train.py;"
            f" got {name!r}{did_you_mean(name, options)}"
        )


def _split(name: str, values: str) -> list[str]:
    """Splits at the commas outside of parentheses."""
    pieces, depth = [""], 0
    for letter in values:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth or not all(piece.strip() for piece in pieces):
        raise ValueError(f"set {name} must be values between commas; got {values!r}")
    return pieces


def _option_words(name: str, value: str, kind: Any) -> list[str]:
    """["--dim", "32"]; ["--no-mask-padding"] for a setting that is True or False."""
    option = name.replace("_", "-")
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"set {name} must be True or False; got {value!r}")
        return [f"--{option}" if value.lower() == "true" else f"--no-{option}"]
    try:
        return [f"--{option}", *shlex.split(value)]
    except ValueError as error:
        raise ValueError(f"set {name}: {value!r} has no closing quotation mark") from error


def _check_common(common: Sequence[str], by_name: Mapping[str, Any]) -> None:
    for word in common:
        if not word.startswith("--"):
            continue
        name = word[2:].split("=")[0].replace("-", "_")
        if name in _NOT_OPTIONS:
            raise ValueError(f"--{name.replace('_', '-')} must be left out: {_NOT_OPTIONS[name]}")
        if name.removeprefix("no_") in by_name:
            raise ValueError(f"{name} must be given once; got both --set and {word}")
