"""The tasks that models are trained on. A new task is one file; see `sequences.SequenceTask`."""

from attention_jax.tasks.copy import Copy
from attention_jax.tasks.noisy_recall import NoisyRecall
from attention_jax.tasks.recall import Recall
from attention_jax.tasks.regression import Regression
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.selective_copy import SelectiveCopy
from attention_jax.tasks.sort import Sort
from attention_jax.tasks.text import Text
from attention_jax.tasks.translation.task import Translation
from attention_jax.training.identity import task_in
from attention_jax.training.settings import task_class
from attention_jax.training.task import Task

__all__ = ["TASKS", "task_in", "task_of"]

_TASKS: tuple[type[Task], ...] = (
    *(Reversal, Copy, Sort, Recall, NoisyRecall, SelectiveCopy, Regression),
    *(Text, Translation),
)
TASKS: dict[str, type[Task]] = {task.name: task for task in _TASKS}


def task_of(text: str) -> type[Task]:
    """The task with a name in `TASKS`, or "module:Name" for a task of your own.

    Raises:
        ValueError: in one line: there is none, or it is no task.

    >>> task_of("reversal").__name__
    'Reversal'
    """
    return task_class(text, TASKS)
