"""The settings of a run: a task as the content of config.json, and back.

config.json knows a task by the name of its class, "module:Name", by its fields, by the scores and
normalisers that its model names, and, if a user wrote it, by the program of its batch, loss and
own optimiser.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.core.errors import one_line
from attention_jax.core.names import did_you_mean, is_of_this_package
from attention_jax.normalizers import get_normalizer
from attention_jax.runs.run_folder import JSON
from attention_jax.scores import get_score
from attention_jax.training.task import (
    Task,
    TrainConfig,
    Validation,
    check_instances,
    undefined,
)
from attention_jax.training.task_class import name_of, task_class, task_part

# The entries of config.json that describe the functions of a run, not its settings.
_OF_TASK = ("program", "program_numbers", "jax")
DESCRIPTIONS = ("scores", "normalizers", "optimizer_program", *_OF_TASK)

# The kinds of parts of a model in config.json, and what a name of such a part names.
PARTS: dict[str, Callable[[Any], Any]] = {"scores": get_score, "normalizers": get_normalizer}
_RENAMED = re.compile(r"(?:^|\s+)(task|(?:self_attention_)?(?:score|normalizer))=")

# --- a task as JSON ---


def check_task(task: Task) -> None:
    """Raises ValueError unless a run can train this task, be resumed and be evaluated.

    Nothing is traced, and no data are read. Each setting must be what config.json gives back: a
    number that is not NaN, a text, a Path, None, or a tuple of them.
    """
    if not isinstance(task, Task):
        raise ValueError(f"task must be an instance of a subclass of Task; got {task!r}")
    cls = type(task)
    name = name_of(cls)
    if not is_of_this_package(cls):
        if cls.__module__ == "__main__" or "<locals>" in name:
            raise ValueError(
                f"task {name!r} must be a class at the top of a module, which another process can"
                " import to evaluate the run"
            )
        if task_class(name) is not cls:
            raise ValueError(f"task {name!r} must be the class that its module has now")
        task_part(task).check_signatures(task)
    check_instances(task, train=TrainConfig)
    if task.train.steps % task.train.accumulate:  # earlier runs with such steps can be evaluated
        raise ValueError(
            f"steps must be a multiple of accumulate {task.train.accumulate}, for the last update"
            f" to be made; got {task.train.steps}"
        )
    train = task.train
    if train.warmup_steps > train.updates and not train.warmup_from_0:  # earlier runs may
        raise ValueError(
            f"warmup_steps must be at most the number of updates, {train.updates}; got"
            f" {train.warmup_steps}"
        )
    if task.validation is not None:
        check_instances(task, validation=Validation)
        if cls.validate is Task.validate:
            raise undefined(task, "validate(params, folder)")
    if cls.evaluate is Task.evaluate:
        raise undefined(task, "evaluate(params, lengths=(), *, folder=None)")
    try:
        read = _made(cls, fields_of(task), name)
    except Exception as error:  # of the user's __post_init__, perhaps
        raise ValueError(
            f"task {name} cannot be made again from config.json: {one_line(error)}"
        ) from error
    again = leaves_of(read)
    for name, value in leaves_of(task).items():
        plain = value.item() if isinstance(value, np.generic) else value
        plain = plain.absolute() if isinstance(plain, Path) else plain
        try:
            hash(plain)  # a task is a static argument of compiled functions
            same = type(plain) is type(again[name]) and plain == again[name]
        except TypeError:
            same = False
        if not same:
            raise ValueError(
                f"{name} must be a setting that config.json gives back as it is: a number, a text,"
                f" a Path, None, or a tuple of them; got {value!r}"
            )


def leaves_of(settings: Any, prefix: str = "") -> dict[str, Any]:
    """The settings in a task, or in nested dicts, by names such as "model.dim"."""
    if isinstance(settings, dict):
        values, is_nested = settings, lambda value: isinstance(value, dict)
    else:
        values = {
            field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
        }
        is_nested = dataclasses.is_dataclass
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        name = prefix + name
        leaves |= leaves_of(value, f"{name}.") if is_nested(value) else {name: value}
    return leaves


def task_from(content: JSON, names: Mapping[str, str] | None = None) -> Task:
    """The task with the settings of a config.json; its program is not compared.

    Args:
        content: of config.json.
        names: new names of the task and of the parts of its model, from `names_in`.
    """
    if ":" not in str(content.get("task")):
        raise ValueError(
            f"config.json must name its task as module:Name; got {content.get('task')!r}: train the"
            " run anew"
        )
    try:
        content = _renamed(content, names or {})
        name = content["task"]
        cls = _there("task", lambda: task_class(name))
        for kind, get in PARTS.items():
            for setting in content.get(kind, {}):
                if (text := content["model"].get(setting)) is not None:
                    _there(setting, functools.partial(get, text))
        ours = ("task", *DESCRIPTIONS)
        task: Task = _made(cls, {k: v for k, v in content.items() if k not in ours}, name)
        if hasattr(task.model, "check_parts_are"):
            task.model.check_parts_are(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"config.json is damaged: {one_line(error)}") from error
    return task


def _there(setting: str, get: Callable[[], Any]) -> Any:
    """What a name in config.json names; ValueError, which says what to do if it is gone."""
    try:
        return get()
    except ValueError as error:
        form = "" if setting == "score" else f", {setting}=module:Name"
        cure = f"; if it was renamed, give its new name as score{form}"
        raise ValueError(f"{error}{cure}") from error


def names_in(score: str | None) -> dict[str, str]:
    """The new names in a text, as in `load_run`: {setting: name}."""
    first, *pairs = _RENAMED.split(score or "")
    return ({"score": first} if first else {}) | dict(zip(pairs[::2], pairs[1::2], strict=True))


def _renamed(content: JSON, names: Mapping[str, str]) -> JSON:
    """The content of a config.json with new names; a name that stands twice is replaced twice."""
    content = {**content, "model": {**content["model"]}}
    parts = {setting for kind in PARTS for setting in content.get(kind, {})}
    for setting, name in names.items():
        if setting == "task":
            content["task"] = name
            continue
        if setting not in parts:
            raise ValueError(f"score must be left out: this run has no {setting}; got {name!r}")
        old = content["model"].get(setting)
        same = {each for each in parts if old is not None and content["model"].get(each) == old}
        content["model"].update(dict.fromkeys({setting, *same}, name))
    return content


def _made(cls: type[Any], content: JSON, owner: str) -> Any:
    """A dataclass from its `dataclasses.asdict`, read back from JSON."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    values = {**getattr(cls, "of_earlier_runs", {})}
    for name, value in content.items():
        if name in names:
            values[name] = _value(hints[name], value, owner)
        elif not name.endswith("_sha256"):  # digests of data
            raise ValueError(
                f"config.json has the setting {name!r}, which {owner} does not have"
                f"{did_you_mean(name, names)}; train the run anew"
            )
    return cls(**values)


def _value(hint: Any, value: Any, owner: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _made(typing.cast(type[Any], hint), value, owner)
    if isinstance(value, str) and Path in (hint, *typing.get_args(hint)):
        return Path(value)
    return tuple(_value(None, each, owner) for each in value) if isinstance(value, list) else value


def fields_of(task: Task) -> JSON:
    """The settings of a task and of its model and training, as JSON gives them back.

    A relative path is of the current folder, and becomes absolute: another folder has other files.
    """
    fields: JSON = plain(dataclasses.asdict(task))  # type: ignore[call-overload]
    return fields


def plain(content: Any) -> Any:
    """What JSON gives back: NumPy's numbers become Python's, and other objects texts."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        return str(value.absolute() if isinstance(value, Path) else value)

    return json.loads(json.dumps(content, default=plain))
