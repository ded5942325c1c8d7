"""Training of a toy task in a folder, as `train_run` trains the real tasks; no tests of its own."""

import dataclasses
from types import SimpleNamespace

import jax

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.training.loop import LoopConfig, initial_state
from attention_jax.training.run import train_run
from attention_jax.training.task_definition import RunData, TaskDefinition


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """Settings of which config.json holds none: a run may be resumed with others."""

    loop: LoopConfig
    label: str = "toy"

    def to_json(self):
        return {"task": "toy"}

    @classmethod
    def from_json(cls, content):
        del content
        return cls(LoopConfig())


def train_toy(
    folder, task, optimizer, loop, *, label="toy", validation=None, statistics=None, **options
):
    """Trains a task, or resumes it: the attributes of `TrainedRun`, and `state`, the last saved."""
    definition = TaskDefinition(
        "toy",
        ToyConfig,
        task=lambda config: task,
        optimizer=lambda config: optimizer,
        prepare=lambda config, workdir, multiple_of: RunData(task, validation=validation),
        gradient_statistics=statistics,
    )
    run = train_run(definition, ToyConfig(loop, label), folder, resume=True, **options)
    return SimpleNamespace(**vars(run), state=saved_state(folder, task, optimizer, loop))


def saved_state(folder, task, optimizer, loop, step=None):
    """The state of a checkpoint; of the newest, if no step is given."""
    like = jax.eval_shape(lambda: initial_state(task, optimizer, loop))
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(like, step=step)
    assert restored is not None
    return restored.state
