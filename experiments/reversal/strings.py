"""What the experiments on strings take from the reversal task: batches, accuracies, answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.tasks.evaluation import Accuracies, accuracies
from attention_jax.tasks.pages import cross_attention
from attention_jax.tasks.reversal import Reversal, reversed_pair
from attention_jax.tasks.vocabulary import Batch, padded_rows
from attention_jax.training.run import TrainedRun

Array = jax.Array

VOCABULARY = Reversal.vocabulary
# Labels for the axes of `plotting.weight_heatmaps`.
LETTER_AXES: dict[str, Any] = {"ylabel": "letter written (query)", "xlabel": "source letter (key)"}


class Reversed(NamedTuple):
    """A word, the model's answer, and the attention weights."""

    word: str
    answer: str
    weights: np.ndarray  # [tokens of the answer, tokens of the source]
    row_labels: list[str]
    column_labels: list[str]


def evaluate(
    trained: TrainedRun,
    *,
    lengths: Sequence[int],
    strings: int = 1000,
    seed: int = 0,
    beams: int = 1,
) -> dict[int, Accuracies]:
    """The `accuracies` of a run."""
    task, params = trained.task, trained.params
    return accuracies(task, params, lengths, strings=strings, seed=seed, beams=beams)


def reverse(trained: TrainedRun, words: Sequence[str], *, seed_index: int = 0) -> list[Reversed]:
    """The greedy answers of one seed, with the weights of its last layer's cross attention."""
    params = trained.params_of(seed_index)
    answers = trained.task.answers(params, words)
    panels = cross_attention(trained.task, params, answers.batch, answers.labels)
    texts = zip(answers.texts, panels.values(), strict=True)
    return [Reversed(word, answer, *panel) for (word, answer, _), panel in texts]


def random_batch(
    rng: Array, *, batch_size: int, min_length: int, max_length: int, source_start: bool
) -> Batch:
    """Random strings and their reversals."""
    task = Reversal(min_length=min_length, max_length=max_length, source_start=source_start)
    return task.batch(rng, size=batch_size)


def reversal_batch(letters: Array, lengths: Array, *, source_start: bool) -> Batch:
    """Given strings, ids [B, L] of which the first `lengths` [B] count, and their reversals."""
    pairs = jax.vmap(reversed_pair)(letters, lengths)
    return Reversal(source_start=source_start).padded(*pairs)


def batch_of_words(words: Sequence[str], *, source_start: bool, width: int = 0) -> Batch:
    """Words, padded to the longest or to `width` letters, and their reversals."""
    rows = [VOCABULARY.encode(word) for word in words]
    letters, lengths = padded_rows(rows, len(rows), max(width, *map(len, rows)))
    return reversal_batch(*map(jax.numpy.asarray, (letters, lengths)), source_start=source_start)
