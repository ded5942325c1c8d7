"""What a run is: the content of config.json, and whether a task is still that of a run.

config.json has the settings of the task, what the scores and normalisers of its model are, digests
of the data, and, of a task or an optimiser that a user wrote, the program and numbers of it.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_jax.core.checks import check_integer
from attention_jax.core.names import is_of_this_package
from attention_jax.runs.checkpoints import saved_steps
from attention_jax.runs.run_folder import JSON, read_config
from attention_jax.training.config import TrainConfig
from attention_jax.training.settings import (
    LEFT_OUT,
    PARTS,
    fields_of,
    leaves_of,
    name_of,
    names_in,
    plain,
    task_from,
    task_part,
)
from attention_jax.training.task import Feed, Task
from attention_jax.training.task_program import Program, programs_of

# --- a run that begins ---


def start_of(task: Task, folder: Path, *, multiple_of: int = 1) -> tuple[Feed | None, JSON]:
    """The feed of a run that begins or resumes, and the content of its config.json.

    Args:
        task: the task, from `check_task`.
        folder: of the run.
        multiple_of: as in `Task.feed`.

    Raises:
        ValueError: the data cannot be used; or the task, a score, a normaliser or the optimiser is
            a user's, and a method of it fails or breaks its contract; in one line, with its name.
    """
    is_users = not is_of_this_package(type(task))
    read = functools.cache(functools.partial(_checked_feed, task, folder))
    # The program of a user's task is that of one device, whatever the mesh is.
    config = config_of(task, lambda: read(1 if is_users else multiple_of))
    feed = read(multiple_of)
    if is_users:
        task.check_numbers()
    return feed, config


def _checked_feed(task: Task, folder: Path, multiple_of: int) -> Feed | None:
    if is_of_this_package(type(task)):
        return task.feed(folder, multiple_of=multiple_of)
    part, read = task_part(task), functools.partial(task.feed, multiple_of=multiple_of)
    feed = part.call("feed(folder, *, multiple_of=1)", read, folder)
    if feed is None:
        check_integer("batch_size", task.train.batch_size)
        return None
    part.require(isinstance(feed, Feed), "feed(folder) must return a Feed or None", feed)
    for name in feed.digests:
        part.require(str(name).endswith("_sha256"), f"digests must end in _sha256; got {name!r}")
    return feed


def config_of(task: Task, feed_of: Callable[[], Feed | None] = lambda: None) -> JSON:
    """The content of config.json, without the numbers that `with_numbers` adds.

    Args:
        task: the task.
        feed_of: gives its feed, if it has one.

    Raises:
        ValueError: the task is a user's, and a method of it fails; in one line, with its name.
    """
    config = {"task": name_of(type(task)), **fields_of(task)}
    for field in dataclasses.fields(task):  # type: ignore[arg-type]
        if field.metadata == LEFT_OUT and config[field.name] == field.default:
            del config[field.name]
    if hasattr(task.model, "describe_parts"):  # before the data is read, which may take seconds
        config |= task.model.describe_parts()
    feed = feed_of()
    config |= {} if feed is None else plain({**feed.digests})
    for program in programs_of(task, feed_of):
        config |= program.entries(program.trace())
    return config


def program_key(config: JSON, *, has_arguments: bool) -> str:
    """Runs with equal texts have equal programs of a step; the converse need not hold.

    Args:
        config: from `start_of`.
        has_arguments: whether the `Hyperparameters` are arguments of the program.
    """
    settings = {**config, **config["train"]}  # whose names are different options
    apart = {"train", "first_seed", "seeds", "init_from", *TrainConfig.free_on_resume}
    if has_arguments:
        settings["train.decays"] = bool(settings["weight_decay"])
        apart |= {*TrainConfig.of_hyperparameters, "optimizer_program"}  # whose rates are constants
    kept = {name: value for name, value in settings.items() if name not in apart}
    return json.dumps(kept, sort_keys=True)


def with_numbers(task: Task, config: JSON, folder: Path) -> JSON:
    """The content of config.json with what is kept of the programs of a user: `Program.kept`.

    Args:
        task: the task.
        config: from `start_of`.
        folder: of the run, which may be new.
    """
    stored = read_config(folder) if (folder / "config.json").exists() else {}
    for program in _programs(task, folder):
        config = config | program.kept(stored, config)
    return config


def _programs(task: Task, folder: Path) -> tuple[Program, Program]:
    return programs_of(task, lambda: task.feed(folder))


# --- a run that goes on ---


def as_begun(task: Task, folder: Path) -> Task:
    """The task with what the run in a folder has for the settings in `of_earlier_runs`.

    These say how an earlier version computed: a run goes on as it began, whatever is asked.

    Raises:
        ValueError: config.json cannot be read.
    """
    stored = read_config(folder) if (folder / "config.json").exists() else {}
    kept: dict[str, Any] = {}
    for name in ("model", "train"):
        settings: Any = getattr(task, name, None)
        known, earlier = stored.get(name), getattr(settings, "of_earlier_runs", {})
        if earlier and isinstance(known, dict):
            then = {each: known.get(each, default) for each, default in earlier.items()}
            kept[name] = dataclasses.replace(settings, **then)
    return dataclasses.replace(task, **kept) if kept else task  # type: ignore[type-var]


def check_resumable(task: Task, config: JSON, folder: Path, stored: JSON) -> None:
    """Raises ValueError unless a run may be resumed with the settings of a task.

    They must be those of the run, except for `TrainConfig.free_on_resume`. A setting that did not
    exist yet when the run was trained must have its default, or that of `as_begun`. `steps` may
    change to no less than the run has reached, if the learning rate does not depend on it.

    Args:
        task: the task with the new settings.
        config: the content of its config.json, from `start_of`.
        folder: of the run.
        stored: the content of the run's config.json.
    """
    renamed = _new_names(task, stored)
    if renamed.get("task", stored.get("task")) != config["task"]:
        raise ValueError(f"it is a run of task {stored.get('task')}; got {config['task']}")
    earlier = task_from(stored, renamed)
    # The parts were compared above, and the program is compared below; where other settings change
    # them too, the message names the settings alone.
    old, new = _compared(earlier, stored), _compared(task, config)
    free = {f"train.{name}" for name in TrainConfig.free_on_resume}
    if any(name.endswith("_sha256") for name in config):  # which decide, wherever the data lies
        paths = [name for name, value in leaves_of(task).items() if isinstance(value, Path)]
        free |= {name for name in paths if old[name] is not None}
    names = sorted({*old, *new} - free)
    different = [name for name in names if old.get(name) != new.get(name)]
    of_task, _ = _programs(earlier, folder)
    program = of_task.check(stored, None if different else config)
    if different == ["train.steps"]:
        cure = "resume with the same steps, or train anew in another folder"
        reached = max(saved_steps(folder / "checkpoints"), default=0)
        reason = ""
        if earlier.train.rate_depends_on_steps:
            reason = f"the learning rate falls along a cosine to 0 at step {earlier.train.steps}"
            cure += " (runs with schedule constant or inverse-sqrt can be extended)"
        elif program.get("program") != config.get("program"):  # of an optimiser of a user
            reason = f"the program of task {config['task']} depends on steps"
        elif task.train.steps < reached:
            reason = f"the run has reached step {reached}"
        if reason:
            raise ValueError(
                f"steps was {earlier.train.steps}, now {task.train.steps}, and {reason}: {cure}"
            )
    elif different:
        changes = "; ".join(
            f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in different
        )
        raise ValueError(
            f"it holds a run of another configuration: {changes}. Resume with the same settings, or"
            " name another folder"
        )
    # A run whose optimiser has changed can be evaluated, but neither resumed nor repeated.
    _, of_optimizer = _programs(task, folder)
    of_optimizer.check(stored, config)


def _compared(task: Task, content: JSON) -> JSON:
    """The settings of a task by names such as "model.dim", and the digests of its data."""
    digests = {name: value for name, value in content.items() if name.endswith("_sha256")}
    return leaves_of({**fields_of(task), **digests})


def _new_names(task: Task, stored: JSON) -> dict[str, str]:
    """The names in `task` of the parts of users that config.json names, and of a task that moved.

    A task has moved if a class of its name is in another file now.
    """
    names = {}
    for kind in PARTS:
        for setting, description in stored.get(kind, {}).items():
            name = getattr(task.model, setting, None) or ""
            if "program" in description and ":" in name:
                names[setting] = name
    name, cls = name_of(type(task)), f":{type(task).__qualname__}"
    if "program" in stored and str(stored.get("task")).endswith(cls):
        names["task"] = name
    return names


# --- a run that is read ---


def task_in(workdir: Path | str, *, score: str | None = None) -> Task:
    """The task of the run in a folder, with the settings in its config.json.

    Args:
        workdir: the run's folder.
        score: what the parts of the run are called now, as in `load_run`.

    Raises:
        ValueError: the folder holds no run, or one of a task, a score or a normaliser that has
            changed since, or other settings than the task has.
    """
    folder = Path(workdir)
    content = read_config(folder)
    try:
        task = task_from(content, names_in(score))
        of_task, _ = _programs(task, folder)
        of_task.check(content)
    except ValueError as error:
        raise ValueError(f"workdir {workdir}: {error}") from error
    return task


def unchanged_task(content: JSON, folder: Path) -> Task:
    """The task in a config.json; ValueError if a function of the run, also its optimiser, changed.

    Args:
        content: of config.json.
        folder: of the run.
    """
    task = task_from(content)
    for program in _programs(task, folder):
        program.check(content)
    return task
