"""Measures of reversal models on strings of any length, up to thousands of letters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.nn.positions import random_position_ids
from attention_jax.tasks.evaluation import decoded
from attention_jax.tasks.reversal import Reversal, reversed_pair
from attention_jax.tasks.sequences import FIRST
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.losses import real_tokens
from attention_jax.training.run import TrainedRun

Array = jax.Array
Measure = Callable[[Reversal, Any, Batch], Array]  # task, params of one seed, batch -> [B]

TILE = 64
LETTERS_PER_CALL = 8192  # source letters in one call; its memory grows with them


def measured(
    measure: Measure, trained: TrainedRun, strings: Mapping[int, int]
) -> dict[int, np.ndarray]:
    """Means over random strings of each length, the same strings for all seeds and models.

    Args:
        measure: one of the functions below.
        trained: the run.
        strings: {length: how many strings}. Targets, EOS included, are padded to fill tiles of 64;
            lengths in the same tiles share a program.

    Returns:
        {length: [seeds]}
    """
    means = {}
    for length, count in strings.items():
        width = -(-(length + 1) // TILE) * TILE - 1
        batch = random_strings(trained.task, length, width, count)
        rows = max(1, LETTERS_PER_CALL // width)
        chunks = (Batch(*(x[i : i + rows] for x in batch)) for i in range(0, count, rows))
        parts = [_by_seed(measure, trained.task, trained.params, chunk) for chunk in chunks]
        means[length] = np.concatenate(parts, axis=1).mean(1)
    return means


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def random_strings(task: Reversal, length: Array | int, width: int, count: int) -> Batch:
    """Random strings of one length, padded to a width."""
    rng = jax.random.fold_in(jax.random.key(0), length)
    letters = jax.random.randint(rng, (count, width), FIRST, FIRST + task.letters)
    return task.padded(*jax.vmap(reversed_pair)(letters, jnp.broadcast_to(length, (count,))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _by_seed(measure: Measure, task: Reversal, params: Any, batch: Batch) -> Array:
    return jax.lax.map(lambda of_seed: measure(task, of_seed, batch), params)


def letters_right(task: Reversal, params: Any, batch: Batch) -> Array:
    """The share of letters right, the earlier ones given.

    A model trained on random subsets of positions gets a subset, as in Ruoss et al.
    """
    size, ids = batch.targets.shape[1], None
    if task.model.position_draw == "subset":
        ids = random_position_ids(jax.random.key(0), size, task.model.position_limit)
    logits = task.bind(params)(*batch.inputs, position_ids=ids)
    real = real_tokens(batch.target_lengths - 1, size)
    return jnp.mean(jnp.argmax(logits, axis=-1) == batch.targets, axis=1, where=real)


def strings_right(task: Reversal, params: Any, batch: Batch) -> Array:
    """Whether the model writes every letter and EOS right, from its own earlier letters."""
    answers = decoded(task.bind(params), batch)
    padding = ~real_tokens(batch.target_lengths, answers.shape[1])
    return jnp.all((answers == batch.targets) | padding, axis=1)


def weight_of_right_key(task: Reversal, params: Any, batch: Batch) -> Array:
    """The mean share of a row's weights on the right key, the earlier letters given.

    The right key is that of the letter to be written, and SOS, with which the source has to begin,
    for EOS. For weights that sum to 1 the share is the weight itself; it is 0 if all weights are 0.
    """
    size = batch.targets.shape[1]
    right = jnp.maximum(batch.target_lengths[:, None] - 1 - jnp.arange(size)[None, :], 0)  # [B, T]
    weights = task.bind(params)(*batch.inputs, return_weights=True)[1][-1]  # [B, T, S]
    of_right = jnp.take_along_axis(weights, right[:, :, None], axis=-1)[..., 0]
    sums = jnp.sum(weights, axis=-1)
    shares = jnp.where(sums > 0, of_right / jnp.where(sums > 0, sums, 1), 0)
    return jnp.mean(shares, axis=1, where=real_tokens(batch.target_lengths, size))
