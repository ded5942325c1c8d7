"""What experiments on string reversal share.

An arm is one model of a comparison, trained with several seeds. `trained_arms` trains arms in run
folders; `follow` trains in memory and looks at every seed on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.analysis import learning_statistics
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.loop import initial_state, train_steps
from attention_jax.training.metrics import mean_and_deviation
from attention_jax.training.run import TrainedRun, train_run
from attention_jax.training.task import Task
from experiments.experiment import Expectation
from experiments.lab import Row, exit_if_interrupted
from experiments.reversal.strings import VOCABULARY
from experiments.reversal.training_settings import SHORT_STRINGS

Array = jax.Array
Arrays = dict[str, Any]  # NumPy arrays by name, or dicts of them
Look = Callable[[Any], dict[str, Any]]  # the params of one seed -> {name: array}

CROSS = "decoder_0/cross_attention"


# --- arms in run folders ---


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


def name_of(labels: Row) -> str:
    """The name of an arm: its labels."""
    return " ".join(map(str, labels.values()))


def above_zero(claim: str, source: str, by_seed: np.ndarray) -> Expectation:
    """Returns the claim that a difference is above 0 on average, by two standard errors."""
    _, deviation = mean_and_deviation(by_seed)
    low = 2 * float(deviation) / math.sqrt(by_seed.size)
    tolerance = "2 standard errors over seeds"
    return Expectation(claim, source, float(by_seed.mean()), low, math.inf, tolerance)


# --- models of several seeds, looked at before and during training ---


def follow(config: Reversal, task: Task, look: Look, *, every: int | None = None) -> Arrays:
    """Looks at every seed before training and after each `every` steps.

    Args:
        config: the model and its training.
        task: what is trained.
        look: measures one seed's parameters.
        every: steps between two looks; None trains nothing.

    Returns:
        what `look` returns, with leading axes [looks, seeds].
    """
    state = initial_state(task)
    look_at_all = jax.jit(jax.vmap(look))
    looks = [look_at_all(state.params)]
    if every is not None:
        advance = jax.jit(jax.vmap(functools.partial(train_steps, task, every)))
        for _ in range(config.train.steps // every):
            state, _ = advance(state)
            looks.append(look_at_all(state.params))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *looks)


def look_at_cross_attention(task: Task, batch: Batch, rng: Array) -> Look:
    """Returns a look at the loss and the cross attention's statistics on one batch."""

    def look(params: Any) -> dict[str, Array]:
        statistics = learning_statistics(task.loss, params, batch, rng, depth=0)
        cross = {
            name.removeprefix(f"{CROSS}/"): value
            for name, value in statistics.items()
            if name.startswith(f"{CROSS}/")
        }
        return {"loss": statistics["loss"], **cross}

    return look


def fresh_batch(config: Reversal, rng: Array, strings: int) -> Batch:
    """Returns a batch for looks and tests; its size differs from that of training."""
    return config.batch(rng, size=strings)


def loss_of_guessing() -> float:
    """Returns the loss of a model that guesses every letter, and knows where EOS belongs."""
    config = SHORT_STRINGS
    letters = (config.min_length + config.max_length) / 2
    return letters / (letters + 1) * math.log(len(VOCABULARY.alphabet))
