"""Whether a run may be resumed with the settings of a task, and whether all processes have them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from attention_jax.runs.checkpoints import saved_steps
from attention_jax.runs.processes import exchanged
from attention_jax.runs.run_folder import JSON, read_config
from attention_jax.training.settings import (
    PARTS,
    check_optimizer,
    check_task_program,
    leaves_of,
    plain,
    task_from,
)
from attention_jax.training.task import Task, TrainConfig
from attention_jax.training.task_class import name_of


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


def _data_digests(content: JSON) -> JSON:
    """The digests of the data in a config.json, by names such as "text_sha256.training"."""
    digests = {name: value for name, value in content.items() if name.endswith("_sha256")}
    return leaves_of(digests)


def check_equal_in_all(values: JSON) -> None:
    """Raises ValueError unless all processes of a run have the same values under each name.

    Different machines may round the numbers of a user's score differently.
    """
    of_all = [leaves_of(json.loads(text)) for text in exchanged(json.dumps(values))]
    for index, other in enumerate(of_all):
        for name in {**of_all[0], **other}:
            if of_all[0].get(name) != other.get(name) and not name.endswith("numbers"):
                raise ValueError(
                    f"{name} must be equal in all processes; got {of_all[0].get(name)!r} in"
                    f" process 0 and {other.get(name)!r} in process {index}"
                )


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
