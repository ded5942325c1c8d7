"""A task by its name and its settings: the class that a text names, and the content of config.json.

config.json knows a task by the name of its class, "module:Name", by its fields, by the scores and
normalisers that its model names, and, if a user wrote it, by the program of its batch, loss and
own optimiser.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.core.errors import one_line
from attention_jax.core.names import did_you_mean, imported, is_of_this_package, module_of
from attention_jax.normalizers import get_normalizer
from attention_jax.parts.user_code import UserCode
from attention_jax.runs.run_folder import JSON
from attention_jax.scores import get_score
from attention_jax.training.task import (
    Task,
    TrainConfig,
    Validation,
    check_instances,
    undefined,
)

# The entries of config.json that describe the functions of a run, not its settings.
DESCRIPTIONS = ("scores", "normalizers", "optimizer_program", "program", "program_numbers", "jax")
# Options of scripts/train.py, further keys of config.json, and columns of the table of a sweep.
_RESERVED = {"task", "workdir", "config", "resume", "log_gradients", "mesh", "help"}
_RESERVED |= {"log_to", "profile", "distributed", "processes", "process", "run", "seconds"}
_RESERVED |= {*DESCRIPTIONS}

# The kinds of parts of a model in config.json, and what a name of such a part names.
PARTS: dict[str, Callable[[Any], Any]] = {"scores": get_score, "normalizers": get_normalizer}
# Of a field of a task that config.json has only if it is not the default: a later option.
LEFT_OUT = {"left_out_at_default": True}
_RENAMED = re.compile(r"(?:^|\s+)(task|(?:self_attention_)?(?:score|normalizer))=")

# --- a task by its name ---


def task_class(text: str, names: dict[str, type[Task]] | None = None) -> type[Task]:
    """The class of the task that a text names: one of `names`, or "module:Name".

    Raises:
        ValueError: in one line: the name does not exist, or does not name a task whose fields can
            be options of a command line and settings in config.json.
    """
    known = names or {}
    found: Any = known.get(text) or imported(text, text, "task", known)
    is_task = isinstance(found, type) and issubclass(found, Task)
    params = getattr(found, "__dataclass_params__", None)
    if not is_task or not getattr(params, "frozen", False):
        raise ValueError(f"task {text!r} must be a subclass of Task, a frozen dataclass")
    _check_class(f"task {text!r}", found)
    return typing.cast(type[Task], found)


def _check_class(task: str, cls: Any) -> None:
    """Raises ValueError unless a class has the fields of a task, each with a name of its own."""
    if not isinstance(getattr(cls, "name", None), str):
        raise ValueError(f"{task} must have a class variable name; got none")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if missing := {"model", "train"} - fields.keys():
        raise ValueError(f"{task} must have a field {min(missing)}; got none")
    for name, field in fields.items():
        # Without an annotation the value of a subclass is no field, and nobody reads it.
        value = getattr(cls, name, dataclasses.MISSING)
        if value is not field.default and not isinstance(value, types.MemberDescriptorType):
            raise ValueError(f"{task} must give {name} an annotation ({name}: ... = {value!r})")
    for base in cls.__mro__:
        if not is_of_this_package(base) and "__dataclass_fields__" not in vars(base):
            annotations = inspect.get_annotations(base)
            lost = [name for name, kind in annotations.items() if "ClassVar" not in str(kind)]
            if lost:
                raise ValueError(
                    f"{task} must have @dataclasses.dataclass(frozen=True) above class"
                    f" {base.__name__}, whose {lost[0]} is no field without it"
                )
    try:
        names = [name.rpartition(".")[2] for name in option_types(cls)]
    except NameError as error:
        raise ValueError(f"{task} must have annotations that can be read; got {error}") from error
    taken = [*_RESERVED, *names]
    for name in names:
        negates = name.startswith("no_") and name.removeprefix("no_") in taken  # --no-resume
        if negates or taken.count(name) > 1:
            raise ValueError(
                f"{task} must have another name for the field {name}, which is an option, a"
                " setting or a column already"
            )


def option_types(cls: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each field of a task and of the dataclasses in it, by names like "model.dim"."""
    hints, types = typing.get_type_hints(cls), dict[str, Any]()
    for field in dataclasses.fields(cls):
        inner, name = hints[field.name], prefix + field.name
        is_nested = dataclasses.is_dataclass(inner)
        types |= option_types(inner, f"{name}.") if is_nested else {name: inner}
    return types


def name_of(cls: type[Task]) -> str:
    """The name "module:Name" of a task, from which `task_class` finds it."""
    return f"{module_of(cls)}:{cls.__qualname__}"


def task_part(task: Task) -> UserCode:
    """A user's task, with the words for errors about it."""
    return UserCode("task", name_of(type(task)), "make it a field of the task")


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
    train = task.train
    if train.steps % train.accumulate:  # earlier runs with such steps can be evaluated
        raise ValueError(
            f"steps must be a multiple of accumulate {train.accumulate}, for the last update to be"
            f" made; got {train.steps}"
        )
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
    values, of_class = settings, dataclasses.is_dataclass(settings)
    if of_class:
        names = (field.name for field in dataclasses.fields(settings))
        values = {name: getattr(settings, name) for name in names}
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = dataclasses.is_dataclass(value) if of_class else isinstance(value, dict)
        leaves |= leaves_of(value, f"{prefix}{name}.") if is_nested else {prefix + name: value}
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
        cls = _there("task", task_class, name)
        for setting, get in _parts(content).items():
            if (text := content["model"].get(setting)) is not None:
                _there(setting, get, text)
        ours = ("task", *DESCRIPTIONS)
        task: Task = _made(cls, {k: v for k, v in content.items() if k not in ours}, name)
        if hasattr(task.model, "check_parts_are"):
            task.model.check_parts_are(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"config.json is damaged: {one_line(error)}") from error
    return task


def _parts(content: JSON) -> dict[str, Callable[[Any], Any]]:
    """The settings that name parts of a model, and what a name of each names."""
    return {setting: get for kind, get in PARTS.items() for setting in content.get(kind, {})}


def _there(setting: str, get: Callable[[Any], Any], name: Any) -> Any:
    """What a name in config.json names; ValueError, which says what to do if it is gone."""
    try:
        return get(name)
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
    content, parts = {**content, "model": {**content["model"]}}, _parts(content)
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
