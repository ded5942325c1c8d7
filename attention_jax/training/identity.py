"""What a run is: the content of config.json, and whether a task is still that of a run.

config.json has the settings of the task, what the scores and normalisers of its model are, digests
of the data, and, of a task or an optimiser that a user wrote, the program and numbers of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from attention_jax.core.checks import check_integer
from attention_jax.core.names import is_of_this_package
from attention_jax.runs.checkpoints import saved_steps
from attention_jax.runs.run_folder import JSON, read_config
from attention_jax.training.config import TrainConfig
from attention_jax.training.settings import (
    PARTS,
    fields_of,
    leaves_of,
    names_in,
    plain,
    task_from,
)
from attention_jax.training.task import Feed, Task
from attention_jax.training.task_class import name_of, task_part
from attention_jax.training.task_program import (
    check_program,
    kept_program,
    numbers_of,
    numbers_of_optimizer,
    optimizer_part,
    program_of,
    program_of_optimizer,
)

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
    parts = _describe_parts(task)  # before the data is read, which may take seconds
    feed = _checked_feed(task, folder, multiple_of)
    if is_of_this_package(type(task)):
        return feed, config_of(task, feed, parts)
    # The program of a user's task is that of one device, whatever the mesh is.
    config = config_of(task, feed if multiple_of == 1 else task.feed(folder), parts)
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


def config_of(task: Task, feed: Feed | None = None, parts: JSON | None = None) -> JSON:
    """The content of config.json, without the numbers that `with_numbers` adds.

    Args:
        task: the task.
        feed: from `Task.feed`, if it has one.
        parts: what `_describe_parts` has returned; None to call it.

    Raises:
        ValueError: the task is a user's, and a method of it fails; in one line, with its name.
    """
    digests = {} if feed is None else plain({**feed.digests})
    parts = _describe_parts(task) if parts is None else parts
    optimizer = program_of_optimizer(task)
    return {
        "task": name_of(type(task)),
        **fields_of(task),
        **parts,
        **digests,
        **program_of(task, lambda: feed),
        **({"optimizer_program": optimizer} if optimizer else {}),
    }


def _describe_parts(task: Task) -> JSON:
    """The scores and normalisers that a model of this library names, traced; {} for another."""
    return task.model.describe_parts() if hasattr(task.model, "describe_parts") else {}


def program_key(config: JSON, *, has_arguments: bool) -> str:
    """Runs with equal texts have equal programs of a step; the converse need not hold.

    Args:
        config: from `start_of`.
        has_arguments: whether the `Hyperparameters` are arguments of the program.
    """
    train = {**config["train"]}
    kept = {name: value for name, value in config.items() if name != "train"}
    apart: tuple[str, ...] = ("first_seed", "seeds", *TrainConfig.free_on_resume, "init_from")
    if has_arguments:
        train["decays"] = bool(train["weight_decay"])
        apart += TrainConfig.of_hyperparameters
        kept.pop("optimizer_program", None)  # its rates are constants
    train = {name: value for name, value in train.items() if name not in apart}
    return json.dumps({**kept, "train": train}, sort_keys=True)


def with_numbers(task: Task, config: JSON, folder: Path) -> JSON:
    """The content of config.json with what is kept of the programs of a user, see `kept_program`.

    Args:
        task: the task.
        config: from `start_of`.
        folder: of the run, which may be new.
    """
    stored = read_config(folder) if (folder / "config.json").exists() else {}
    now: JSON = {name: config[name] for name in ("program", "jax") if name in config}
    config = config | kept_program(stored, now, lambda: numbers_of(task, task.feed(folder)))
    name = "optimizer_program"
    sample = functools.partial(numbers_of_optimizer, task)
    optimizer = kept_program(stored.get(name, {}), config.get(name, {}), sample)
    return config | ({name: optimizer} if optimizer else {})


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
        known = stored.get(name)
        earlier = getattr(settings, "of_earlier_runs", {})
        if earlier and isinstance(known, dict):
            own = {each: known[each] for each in earlier.keys() & known.keys()}
            kept[name] = dataclasses.replace(settings, **(earlier | own))
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
    old, new = (
        {**plain(leaves_of(each)), **_data_digests(content)}
        for each, content in ((earlier, stored), (task, config))
    )
    free = {f"train.{name}" for name in TrainConfig.free_on_resume}
    if _data_digests(config):  # which decide, wherever the data lies
        paths = [name for name, value in leaves_of(task).items() if isinstance(value, Path)]
        free |= {name for name in paths if old[name] is not None}
    names = sorted({*old, *new} - free)
    different = [name for name in names if old.get(name) != new.get(name)]
    program = check_task_program(earlier, stored, folder, None if different else config)
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
    check_optimizer(task, stored, config)


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


def _data_digests(content: JSON) -> JSON:
    """The digests of the data in a config.json, by names such as "text_sha256.training"."""
    digests = {name: value for name, value in content.items() if name.endswith("_sha256")}
    return leaves_of(digests)


def check_task_program(task: Task, stored: JSON, folder: Path, now: JSON | None = None) -> JSON:
    """Returns the program of a task, or `now` if it is known; ValueError if it has changed."""
    feed = functools.cache(lambda: task.feed(folder))
    now = program_of(task, feed) if now is None else now
    check_program(task_part(task), stored, now, lambda: numbers_of(task, feed()))
    return now


def check_optimizer(task: Task, stored: JSON, now: JSON) -> None:
    # A run whose optimiser has changed can be evaluated, but neither resumed nor repeated.
    then, program = (content.get("optimizer_program", {}) for content in (stored, now))
    sample = functools.partial(numbers_of_optimizer, task)
    check_program(optimizer_part(task), then, program, sample)


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
        check_task_program(task, content, folder)
    except ValueError as error:
        raise ValueError(f"workdir {workdir}: {error}") from error
    return task


def check_functions(content: JSON, folder: Path) -> None:
    """Raises ValueError if a function of a run has changed since its config.json was written.

    Args:
        content: of config.json.
        folder: of the run.
    """
    task = task_from(content)
    check_task_program(task, content, folder)
    check_optimizer(task, content, {"optimizer_program": program_of_optimizer(task)})
