"""The class of a task, which a text names: "module:Name"."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from attention_jax.core.names import imported, is_of_this_package, module_of
from attention_jax.parts.user_code import UserCode
from attention_jax.training.task import Task

# Options of scripts/train.py, further keys of config.json, and columns of the table of a sweep.
_RESERVED = {"task", "workdir", "config", "resume", "log_gradients", "mesh", "help"}
_RESERVED |= {"log_to", "profile", "distributed", "processes", "process"}
_RESERVED |= {"scores", "normalizers", "program", "program_numbers", "optimizer_program", "jax"}
_RESERVED |= {"run", "seconds"}


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
        types |= (
            option_types(inner, f"{name}.") if dataclasses.is_dataclass(inner) else {name: inner}
        )
    return types


def name_of(cls: type[Task]) -> str:
    """The name "module:Name" of a task, from which `task_class` finds it."""
    return f"{module_of(cls)}:{cls.__qualname__}"


def check_differ(task: Task, method: str, draw: Callable[[Any], Any], drawn: Any) -> None:
    """Warns if keys give equal examples; raises ValueError if they must, because rng is not used.

    Args:
        task: a user's.
        method: what draws an example, for the words.
        draw: takes a key, and returns an example.
        drawn: examples in NumPy, [B, ...] each, of other keys in every row.
    """
    leaves = jax.tree.leaves(drawn)
    if not all(np.array_equal(leaf, leaf[:1].repeat(len(leaf), 0)) for leaf in leaves):
        return
    part, jaxpr = task_part(task), jax.make_jaxpr(draw)(jax.random.key(0)).jaxpr
    is_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][0]
    part.require(is_used, f"{method} must draw with its rng; each key gives the same example")
    warnings.warn(
        f"{part.name}: {method} draws the same example with each of {len(leaves[0])} keys; either"
        " there is no other, or it does not draw with its rng",
        stacklevel=2,
    )


def task_part(task: Task) -> UserCode:
    """A user's task, with the words for errors about it."""
    return UserCode("task", name_of(type(task)), "make it a field of the task")
