"""What experiments on string reversal share.

An arm is one model of a comparison, trained with several seeds. `trained_arm` trains it in a run
folder and reads its numbers; `follow` trains in memory and looks at every seed on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.analysis import learning_statistics
from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.evaluation import Accuracies
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.loop import initial_state, train_steps
from attention_jax.training.metrics import mean_and_deviation
from attention_jax.training.run import TrainedRun, train_run
from attention_jax.training.task import Task
from experiments.experiment import JSON, Expectation, rounded
from experiments.lab import exit_if_interrupted
from experiments.reversal.strings import VOCABULARY, Reversed
from experiments.reversal.training_settings import SHORT_STRINGS

Array = jax.Array
Arrays = dict[str, Any]  # NumPy arrays by name, or dicts of them
Look = Callable[[Any], dict[str, Any]]  # the params of one seed -> {name: array}

TRAINED_LENGTHS = range(SHORT_STRINGS.min_length, SHORT_STRINGS.max_length + 1)
EXTRAPOLATION_LENGTH = 10
CROSS = "decoder_0/cross_attention"


# --- an arm in a run folder ---


def trained_arm(config: Reversal, workdir: Path) -> tuple[TrainedRun, JSON]:
    """Trains an arm in a folder, or loads it if it is finished there.

    A signal stops the training and ends the process; the same command then resumes the run.

    Returns:
        the run, and {"steps", "loss", "seconds", "steps_per_second"}.
    """
    trained = train_run(config, workdir, resume=True)
    exit_if_interrupted(trained.interrupted)
    lines = read_lines(workdir / "metrics.jsonl")
    sessions = read_lines(workdir / "timing.jsonl")  # several if the run was stopped and resumed
    return trained, {
        "steps": [line["step"] for line in lines],
        "loss": [line["loss"] for line in lines],
        "seconds": _seconds(sessions, config.train.steps),
        "steps_per_second": sessions[-1]["steps_per_second"] if sessions else None,
    }


def _seconds(sessions: list[JSON], steps: int) -> float | None:
    """The time of all sessions; None if a session was killed before it wrote its line."""
    done = sum(session["to_step"] - session["from_step"] for session in sessions)
    return sum(session["seconds"] for session in sessions) if done == steps else None


def accuracies(evaluations: dict[int, Accuracies]) -> JSON:
    """Returns {metric: {length: one number per seed}}."""
    return {
        metric: {
            str(length): [round(float(share), 6) for share in getattr(evaluation, metric)]
            for length, evaluation in evaluations.items()
        }
        for metric in Accuracies._fields
    }


def mean_over_lengths(accuracy: JSON, metric: str, lengths: Sequence[int]) -> np.ndarray:
    """Returns the mean over lengths of one metric of `accuracies`, [seeds]."""
    return np.mean([accuracy[metric][str(length)] for length in lengths], axis=0)


def percent(shares: Iterable[float]) -> str:
    """Returns shares as "85 / 98 / 100"."""
    return " / ".join(f"{100 * share:.0f}" for share in shares)


def above_zero(claim: str, source: str, by_seed: np.ndarray) -> Expectation:
    """Returns the claim that a difference is above 0 on average, by two standard errors."""
    _, deviation = mean_and_deviation(by_seed)
    low = 2 * float(deviation) / math.sqrt(by_seed.size)
    tolerance = "2 standard errors over seeds"
    return Expectation(claim, source, float(by_seed.mean()), low, math.inf, tolerance)


def heat_map(answer: Reversed) -> JSON:
    """Returns the attention weights of one word, and the tokens of their rows and columns."""
    return {
        "row_labels": answer.row_labels,
        "column_labels": answer.column_labels,
        "weights": rounded(answer.weights, 3),
    }


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
