"""The loss of translation, of a batch and of a whole text, by hand."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.translation.batches import Batches, Pairs
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.vocabulary import EOS, padded_batch

V = 17  # of models that are given ids, not text
MODEL = ModelConfig(num_heads=2, dim=8, hidden_dim=13, encoder_layers=0, tied_embeddings="all")


def task(*, model=None, **settings):
    """Of files that need not be there."""
    return Translation(
        source=Path("a.de"),
        target=Path("a.en"),
        vocabulary_size=V,
        model=dataclasses.replace(MODEL, **(model or {})),
        **settings,
    )


# --- the loss ---


def ids(rng, length):
    return [*rng.integers(4, V, length).tolist(), EOS]


def some_batch(source_lengths=(6, 2, 4), target_lengths=(3, 5, 1), rows=5, seed=0):
    """Of 3 pairs and 2 rows without one; lengths without EOS."""
    rng = np.random.default_rng(seed)
    sources = [ids(rng, length) for length in source_lengths]
    targets = [ids(rng, length) for length in target_lengths]
    return padded_batch(sources, targets, rows, 7, 6)


@functools.cache
def initial_params():
    return jax.jit(task().init)(jax.random.key(0))


@jax.jit
def forward(params, *inputs):
    return task().bind(params)(*inputs)


SMOOTHED = task(label_smoothing=0.25, model={"dropout_rate": 0.3})


@jax.jit
def losses(params, batch):
    """(loss, metrics) without dropout; losses with that of the seeds 0, 1 and 0."""

    def dropped(seed):
        return SMOOTHED.loss(params, batch, jax.random.key(seed))[0]

    return SMOOTHED.loss(params, batch, None), jax.vmap(dropped)(jnp.array([0, 1, 0]))


def sums_by_hand(batch):
    """(smoothed loss, negative log-likelihood, right, tokens), in float64 from the logits."""
    logits = np.float64(forward(initial_params(), *batch.inputs))
    sums, smoothing = np.zeros(4), SMOOTHED.label_smoothing
    for row, length in enumerate(batch.target_lengths):
        for position in range(length):
            at = logits[row, position]
            log_p, target = at - np.log(np.sum(np.exp(at))), batch.targets[row, position]
            wanted = np.full(V, smoothing / V)
            wanted[target] += 1 - smoothing
            sums += [-wanted @ log_p, -log_p[target], np.argmax(at) == target, 1]
    return sums


def test_the_loss_is_the_smoothed_cross_entropy_of_real_subwords():
    """And its rng is for dropout."""
    batch = some_batch()
    (loss, metrics), dropped = losses(initial_params(), batch)
    smoothed, nats, right, tokens = sums_by_hand(batch)
    assert tokens == 4 + 6 + 2
    np.testing.assert_allclose(loss, smoothed / tokens, rtol=1e-5)
    assert set(metrics) == {"negative_log_likelihood", "accuracy"}
    np.testing.assert_allclose(metrics["negative_log_likelihood"], nats / tokens, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], right / tokens, rtol=1e-6)
    assert abs(smoothed - nats) > 1e-3
    assert dropped[0] == dropped[2] != dropped[1]


# --- the loss of a whole text ---


def test_the_mean_loss_is_that_of_each_pair_alone():
    rng = np.random.default_rng(3)
    sides = [[ids(rng, length) for length in rng.integers(1, 6, 13)] for _ in range(2)]
    found = SMOOTHED.mean_loss(initial_params(), Batches(Pairs(*sides, 0), tokens=40, buckets=1))
    sums = np.zeros(4)
    for source, target in zip(*sides, strict=True):
        sums += sums_by_hand(padded_batch([source], [target], 5, 7, 6))
    assert found["loss"] == pytest.approx(sums[0] / sums[3], rel=1e-5)
    assert found["negative_log_likelihood"] == pytest.approx(sums[1] / sums[3], rel=1e-5)
