"""Accuracy of reversal models on strings of any length, up to thousands of letters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.nn.config import ModelConfig
from attention_jax.nn.positions import random_position_ids
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Batch
from attention_jax.training.metrics import exact_match, token_accuracy
from attention_jax.training.run import TrainedRun
from experiments.reversal.strings import VOCABULARY, reversal_batch

Array = jax.Array

WIDTH = 64  # targets, EOS included, are padded to multiples of it: few programs, whole tiles
LETTERS_PER_CALL = 8192  # source letters in one call; its memory grows with them
FIRST_LETTER = VOCABULARY.size - len(VOCABULARY.alphabet)


def teacher_forced(
    trained: TrainedRun, lengths: Iterable[int], *, strings: int, seed: int = 0
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Measures accuracy with the previous letters given.

    Every seed of every model gets the same strings. A string is right if its EOS is right, too.

    Returns:
        {length: (share of letters right [seeds], share of strings right [seeds])}
    """
    accuracies = {}
    for length in lengths:
        width = -(-(length + 1) // WIDTH) * WIDTH - 1
        batch = _strings(trained.task, length, width, strings, seed)
        accuracies[length] = _by_chunks(_forced, trained, batch)
    return accuracies


def free_running(
    trained: TrainedRun, lengths: Iterable[int], *, strings: dict[int, int], seed: int = 0
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Measures the same with the model's own previous letters; `strings` is {length: count}."""
    accuracies = {}
    for length in lengths:
        batch = _strings(trained.task, length, length, strings[length], seed)
        accuracies[length] = _by_chunks(_free, trained, batch)
    return accuracies


def strings_right(
    trained: TrainedRun, strings: dict[int, int], *, seed: int = 0
) -> dict[int, np.ndarray]:
    """Measures whole strings right in free running, like `free_running`, with two programs.

    Args:
        trained: the run.
        strings: {length: how many strings}. Those of at most a quarter of the longest length are
            padded to the longest of them, and the others to the longest of all.
        seed: of the strings.

    Returns:
        {length: share of strings right [seeds]}
    """
    shares: dict[int, np.ndarray] = {}
    for short in (True, False):
        group = {n: count for n, count in strings.items() if (4 * n <= max(strings)) == short}
        if group:
            batch = _mixed(trained.task, group, seed)
            _, exact = _free(trained.task, trained.params, batch)
            shares |= _by_length(exact, group)
    return {length: shares[length] for length in strings}


def share_of_right_key(
    trained: TrainedRun, strings: dict[int, int], *, seed: int = 0
) -> dict[int, np.ndarray]:
    """Measures how sharp attention is: the share of a row's weights on the right key.

    The earlier letters are given. The right key is that of the letter to be written, and SOS, with
    which the source has to begin, for EOS. The share is 0 if all weights of a row are 0.

    Args:
        trained: the run.
        strings: {length: how many strings}, padded to the longest of them.
        seed: of the strings.

    Returns:
        {length: mean over queries and strings [seeds]}
    """
    batch = _mixed(trained.task, strings, seed)
    return _by_length(_shares(trained.task, trained.params, batch), strings)


def _mixed(config: Reversal, strings: dict[int, int], seed: int) -> Batch:
    """A batch of strings of several lengths, one length after another."""
    width = max(strings)
    batches = [_strings(config, length, width, count, seed) for length, count in strings.items()]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)


def _by_length(by_string: Array, strings: dict[int, int]) -> dict[int, np.ndarray]:
    """[seeds, strings of `_mixed`] -> {length: mean over its strings [seeds]}"""
    ends = np.cumsum(list(strings.values()))
    parts = np.split(np.asarray(by_string), ends[:-1], axis=1)
    return {length: part.mean(1) for length, part in zip(strings, parts, strict=True)}


def weights_on(trained: TrainedRun, length: int, *, seed: int = 0) -> np.ndarray:
    """Returns the first seed's cross-attention weights [T, S] on one string, the answer given."""
    batch = _strings(trained.task, length, length, 1, seed)
    params = jax.tree.map(lambda leaf: leaf[0], trained.params)

    @jax.jit
    def look(params: Any) -> Array:
        model = trained.task.bind(params)
        return model(
            batch.source, batch.source_lengths, batch.target_inputs,
            position_ids=_position_ids(trained.task.model, batch), return_weights=True,
        )[1]  # fmt: skip

    return np.asarray(look(params))[-1, 0]


def peak_memory(trained: TrainedRun, length: int) -> float:
    """Returns the MiB of temporary memory, by XLA, of a teacher-forced pass over one string."""
    batch = _strings(trained.task, length, length, 1, 0)
    compiled = _forced.lower(trained.task, trained.params, batch).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes / 2**20


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _strings(config: Reversal, length: Array | int, width: int, count: int, seed: int) -> Batch:
    """Random strings of one length, padded to a width."""
    rng = jax.random.fold_in(jax.random.key(seed), length)
    drawn = jax.random.randint(rng, (count, width), FIRST_LETTER, FIRST_LETTER + config.letters)
    lengths = jnp.broadcast_to(length, (count,))
    return reversal_batch(drawn, lengths, source_start=config.source_start)


def _by_chunks(look: Any, trained: TrainedRun, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    count, width = batch.targets.shape
    rows = max(1, LETTERS_PER_CALL // width)
    chunks = []
    for first in range(0, count, rows):
        rows_of = operator.itemgetter(slice(first, first + rows))
        chunks.append(look(trained.task, trained.params, jax.tree.map(rows_of, batch)))
    tokens, exact = (np.concatenate([np.asarray(chunk[k]) for chunk in chunks], 1) for k in (0, 1))
    return tokens.mean(1), exact.mean(1)


@functools.partial(jax.jit, static_argnums=0)
def _forced(task: Reversal, params: Any, batch: Batch) -> tuple[Array, Array]:
    def one_seed(params: Any) -> tuple[Array, Array]:
        model = task.bind(params)
        logits = model(
            batch.source, batch.source_lengths, batch.target_inputs,
            position_ids=_position_ids(task.model, batch),
        )  # fmt: skip
        return _right(jnp.argmax(logits, axis=-1), batch)

    return jax.lax.map(one_seed, params)


@functools.partial(jax.jit, static_argnums=0)
def _free(task: Reversal, params: Any, batch: Batch) -> tuple[Array, Array]:
    def one_seed(params: Any) -> tuple[Array, Array]:
        decoded = task.bind(params).greedy_decode(
            batch.source, batch.source_lengths, max_length=batch.targets.shape[1],
            sos=SOS, eos=EOS, pad=PAD, position_ids=_position_ids(task.model, batch),
        )  # fmt: skip
        return _right(decoded.tokens, batch)

    return jax.lax.map(one_seed, params)


@functools.partial(jax.jit, static_argnums=0)
def _shares(task: Reversal, params: Any, batch: Batch) -> Array:
    """Per seed and string: the mean share of the right key, [seeds, B]."""
    rows = jnp.arange(batch.targets.shape[1])[None, :]
    right = jnp.maximum(batch.target_lengths[:, None] - 1 - rows, 0)  # [B, T]
    real = rows < batch.target_lengths[:, None]

    def one_seed(params: Any) -> Array:
        weights = task.bind(params)(
            batch.source, batch.source_lengths, batch.target_inputs,
            position_ids=_position_ids(task.model, batch), return_weights=True,
        )[1][-1]  # fmt: skip
        of_right = jnp.take_along_axis(weights, right[:, :, None], axis=-1)[..., 0]
        sums = jnp.sum(weights, axis=-1)
        shares = jnp.where(sums > 0, of_right / jnp.where(sums > 0, sums, 1), 0)
        return jnp.mean(shares, axis=-1, where=real)

    return jax.lax.map(one_seed, params)


def _right(predictions: Array, batch: Batch) -> tuple[Array, Array]:
    """Per string, [B]: share of letters right, and 1 if all letters and EOS are right."""

    def by_string(metric: Any, lengths: Array) -> Array:
        rows = (leaf[:, None] for leaf in (predictions, batch.targets, lengths))
        return jax.vmap(metric)(*rows)

    return (
        by_string(token_accuracy, batch.target_lengths - 1),
        by_string(exact_match, batch.target_lengths),
    )


def _position_ids(config: ModelConfig, batch: Batch) -> Array | None:
    """A random subset for a model trained on random subsets, as in Ruoss et al.; else None."""
    if config.position_draw != "subset":
        return None
    return random_position_ids(jax.random.key(0), batch.targets.shape[1], config.position_limit)
