"""The settings that experiments share which train models on string reversal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.task import TrainConfig

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
