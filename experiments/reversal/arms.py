"""Arms of an experiment on string reversal: their settings, and their trainings with seeds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from attention_jax.nn.config import ModelConfig
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import TrainedRun, train_run
from attention_jax.training.step import initial_state, train_steps
from attention_jax.training.task import Task, TrainConfig
from experiments.lab import Row, exit_if_interrupted

# The settings of the experiments that study strings of 3 to 8 letters alone. Positions are counted
# from the start and are the same in training and test, logits do not grow with the length, the
# source has no SOS, and no parameter decays. A model of these settings has an encoder and a decoder
# with self attention, and reverses no string longer than those of training.
SHORT_STRINGS = Reversal(
    model=ModelConfig(), train=TrainConfig(weight_decay=0.0), source_start=False
)


def changed(task: Reversal, training: Mapping[str, Any], **model: Any) -> Reversal:
    """The task with other settings of its training and of its model."""
    train = dataclasses.replace(task.train, **training)
    return dataclasses.replace(task, model=dataclasses.replace(task.model, **model), train=train)


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Settings of every training; an experiment's Config adds its own and changes defaults.

    Attributes:
        seeds: trainings per arm.
        steps: optimiser steps per training.
        batch_size: strings per step.
        learning_rate: Adam's rate at the start; it falls to 0 along a cosine.
        dim: size of the model's tokens and layers.
    """

    seeds: int = 3
    steps: int = 2500
    batch_size: int | None = SHORT_STRINGS.train.batch_size
    learning_rate: float = SHORT_STRINGS.train.learning_rate
    dim: int = ModelConfig.dim

    def training_of(self, base: Reversal, **settings: Any) -> Reversal:
        """Returns the settings of one run: `base` with these, and `settings` of its model."""
        names = ("seeds", "steps", "batch_size", "learning_rate")
        training = {name: getattr(self, name) for name in names}
        return changed(base, training, dim=self.dim, **settings)


def trained_arms(
    arms: Iterable[tuple[Row, Reversal]], workdir: Path
) -> Iterator[tuple[Row, TrainedRun]]:
    """Trains arms, each in a folder, or loads those that are finished there.

    Arms of equal settings are one run. A signal stops the training and ends the process; the same
    command then resumes the run.

    Args:
        arms: the labels of each arm and its settings.
        workdir: of the folders.

    Yields:
        the labels of each arm and its run.
    """
    runs: dict[Reversal, TrainedRun] = {}
    for labels, task in list(arms):  # wrong settings are found before the first training
        if task not in runs:
            folder = workdir / score_folder(name_of(labels))
            runs[task] = train_run(task, folder, resume=True)
            exit_if_interrupted(runs[task].interrupted)
        yield labels, runs[task]


class AtRate(Task):
    """A task whose learning rate may be traced."""

    def __init__(self, task: Reversal, rate: jax.Array | float):
        self.train, self.init, self.batch, self.loss = task.train, task.init, task.batch, task.loss  # type: ignore[method-assign]
        self.rate = rate

    def optimizer(self) -> optax.GradientTransformation:
        # Adam's updates are proportional to the rate: computed at rate 1, then scaled.
        at_one = dataclasses.replace(self.train, learning_rate=1.0).transformation()
        return optax.chain(at_one, optax.scale(self.rate))


def looks(task: Reversal, every: int, look: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Trains all seeds, and calls `look` before training and after every `every` steps.

    Yields:
        the step, and what `look` returns of the params of each seed, [seeds, ...].
    """
    look = jax.jit(jax.vmap(look))
    advance = jax.jit(jax.vmap(functools.partial(train_steps, task, every)))
    state = initial_state(task)
    for step in range(0, task.train.steps + 1, every):
        yield step, look(state.params)
        if step < task.train.steps:
            state = advance(state)[0]


def name_of(labels: Row) -> str:
    """The name of an arm: its labels."""
    return " ".join(map(str, labels.values()))
