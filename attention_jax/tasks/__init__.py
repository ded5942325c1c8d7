"""The tasks that models are trained on. A new task is a folder here, and a line in `TASKS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention_jax.runs.run_folder import RunFolder
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.training.task_definition import TaskDefinition

TASKS: dict[str, TaskDefinition[Any]] = {task.name: task for task in (REVERSAL, TRANSLATION)}


def task_of(workdir: Path) -> TaskDefinition[Any]:
    """The task of the run in a folder.

    Raises:
        ValueError: the folder holds no run, or a run of an unknown task.
    """
    # The first version of config.json did not name the task, which was reversal.
    name = RunFolder(workdir).read_config().get("task", REVERSAL.name)
    if name not in TASKS:
        raise ValueError(
            f"workdir {workdir} must hold a run of {' or '.join(TASKS)}; got task {name!r}"
        )
    return TASKS[name]
