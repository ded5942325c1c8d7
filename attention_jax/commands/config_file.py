"""--config: turns a file, YAML or the config.json of a run, into words of a command line."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from attention_jax.commands.command_line import parse
from attention_jax.core.errors import one_line
from attention_jax.core.names import did_you_mean
from attention_jax.training.identity import unchanged_task
from attention_jax.training.saved import with_copy
from attention_jax.training.settings import DESCRIPTIONS, fields_of


def read_settings(path: Path) -> dict[str, Any]:
    """Reads the settings in a file.

    Values of a YAML file stay texts, as on a command line: YAML's own types would make a text of
    1e-3, False of off, and a date of 2026-01-02.

    Raises:
        ValueError: in one line: the file cannot be read; or it is the config.json of a run, and a
            score, normaliser, task or optimiser of this run has changed since, or the copy of the
            parameters that it began with is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except ValueError:
            content = yaml.load(text, yaml.BaseLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        place = getattr(error, "problem_mark", None)
        line = f" (line {place.line + 1})" if place else ""
        raise ValueError(f"config {path} cannot be read: {one_line(error)}{line}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config {path} must hold option: value pairs; got {content!r:.100}")
    if content.keys() & DESCRIPTIONS:
        try:
            task = unchanged_task(content, path.parent)  # as the run began
            content = with_copy({**content, **fields_of(task)}, path.parent)
        except ValueError as error:
            raise ValueError(f"config {path}: {error}") from error
    return {
        name: value
        for name, value in content.items()
        if name not in DESCRIPTIONS and not name.endswith("_sha256")
    }


def words_of(path: Path, content: Mapping[str, Any], hints: Mapping[str, Any]) -> list[str]:
    """Turns the settings in a file into the words of a command line.

    Args:
        path: of the file, for errors.
        content: from `read_settings`.
        hints: the type of each option by its name; "model.dim" may be called "dim".

    Raises:
        ValueError: in one line: there is no such option, or its value is of another type.
    """
    known = {**hints, **{name.rpartition(".")[2]: hint for name, hint in hints.items()}}
    words: dict[str, list[str]] = {}
    for key, value in _flat(content, known):
        if key not in known:
            raise ValueError(
                f"config {path}: {key!r} is no option of the task{did_you_mean(key, known)}"
            )
        name, hint = key.rpartition(".")[2], known[key]
        if name in words:
            raise ValueError(f"config {path}: {name} must be given once; got it twice")
        option, may_be = f"--{name.replace('_', '-')}", (hint, *typing.get_args(hint))
        text = value if isinstance(value, str | list | dict) else json.dumps(value)
        flag = yaml.SafeLoader.bool_values.get(text.lower()) if isinstance(text, str) else None
        if type(None) in may_be and text in ("null", "~", ""):
            words[name] = [f"{option}=None"]
        elif hint is bool and flag is not None:
            words[name] = [option if flag else f"--no-{option[2:]}"]
        elif any(typing.get_origin(each) is tuple for each in may_be):
            if isinstance(text, dict):
                text = [f"{axis}={size}" for axis, size in text.items()]
            values = text.split() if isinstance(text, str) else map(str, text)
            words[name] = [option, *values]
        elif isinstance(text, str) and hint is not bool:
            words[name] = [f"{option}={text}"]
        else:
            kind = "true or false" if hint is bool else "one value"
            raise ValueError(f"config {path}: {key} must be {kind}; got {value!r}")
    types = {name: known[name] for name in words if known[name] is not bool}
    try:  # checks each value by itself: values that do not go together may be overridden
        checked_words = [word for name in types for word in words[name]]
        parse(dataclasses.make_dataclass("Options", types.items()), checked_words)
    except ValueError as error:
        raise ValueError(f"config {path}: {error}") from error
    return [word for each in words.values() for word in each]


def _flat(content: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Any:
    """(name, value) pairs of nested settings, under dotted names."""
    for key, value in content.items():
        name = prefix + key.replace("-", "_")
        if isinstance(value, dict) and name not in known:
            yield from _flat(value, known, f"{name}.")
        else:
            yield name, value
