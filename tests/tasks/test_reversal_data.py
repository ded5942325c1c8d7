"""Reversal batches against Python's own [::-1]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import random_batch, reversal_batch

from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Vocabulary

VOCABULARY = Vocabulary("abcdefgh")


def batch(rng, *, batch_size=13, min_length=2, max_length=7, source_start=False):
    return random_batch(
        rng,
        vocabulary=VOCABULARY,
        batch_size=batch_size,
        min_length=min_length,
        max_length=max_length,
        source_start=source_start,
    )


OPTIONS = ("batch_size", "min_length", "max_length", "source_start")
jitted = jax.jit(batch, static_argnames=OPTIONS)


def check_rows(found: Batch, width: int):
    """Every field of every row, spelled out in Python lists."""
    found = jax.tree.map(np.asarray, found)
    for field, array in found._asdict().items():
        assert array.dtype == jnp.int32, field
    for row in range(len(found.source_lengths)):
        source, inputs, targets = (
            np.asarray(array[row]).tolist()
            for array in (found.source, found.target_inputs, found.targets)
        )
        length = int(found.source_lengths[row])
        word = source[:length]
        assert all(3 <= letter < VOCABULARY.size for letter in word)
        assert source == word + [PAD] * (width - length)
        assert inputs == [SOS] + word[::-1] + [PAD] * (width - length)
        assert targets == word[::-1] + [EOS] + [PAD] * (width - length)
        assert int(found.target_lengths[row]) == length + 1


def test_random_rows_are_reversed():
    found = jitted(jax.random.key(0))
    assert found.source.shape == (13, 7)
    assert found.targets.shape == found.target_inputs.shape == (13, 8)
    check_rows(found, 7)


def test_given_rows_are_reversed():
    letters = jnp.array([[3, 4, 5, 6, 7], [8, 9, 10, 9, 8], [7, 7, 7, 7, 7]], jnp.int32)
    lengths = jnp.array([5, 2, 0], jnp.int32)
    found = reversal_batch(letters, lengths, source_start=False)
    assert found.source.tolist() == [[3, 4, 5, 6, 7], [8, 9, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert found.target_inputs.tolist() == [
        [1, 7, 6, 5, 4, 3],
        [1, 9, 8, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]
    assert found.targets.tolist() == [
        [7, 6, 5, 4, 3, 2],
        [9, 8, 2, 0, 0, 0],
        [2, 0, 0, 0, 0, 0],
    ]
    assert found.target_lengths.tolist() == [6, 3, 1]
    check_rows(found, 5)


def test_a_source_that_begins_with_sos():
    letters = jnp.array([[3, 4, 5, 6, 7], [8, 9, 10, 9, 8], [7, 7, 7, 7, 7]], jnp.int32)
    lengths = jnp.array([5, 2, 0], jnp.int32)
    found, without = (reversal_batch(letters, lengths, source_start=s) for s in (True, False))
    assert found.source.tolist() == [[1, 3, 4, 5, 6, 7], [1, 8, 9, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert found.source_lengths.tolist() == [6, 3, 1]
    # Targets are those of the letters alone, and so are the letters that are drawn.
    for name in ("target_inputs", "targets", "target_lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(without, name))
    started, bare = (jitted(jax.random.key(6), source_start=s) for s in (True, False))
    np.testing.assert_array_equal(started.source[:, 1:], bare.source)
    assert np.all(started.source[:, 0] == SOS)
    np.testing.assert_array_equal(started.source_lengths, bare.source_lengths + 1)
    np.testing.assert_array_equal(started.targets, bare.targets)


def test_is_a_pure_function_of_the_rng():
    once, again, other = (jitted(jax.random.key(seed)) for seed in (1, 1, 2))
    eager = batch(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    jax.tree.map(np.testing.assert_array_equal, once, eager)
    assert np.any(once.source != other.source)
    assert np.any(once.source_lengths != other.source_lengths)


def test_vmap_over_rngs_is_a_loop():
    rngs = jax.random.split(jax.random.key(3), 3)
    stacked = jax.jit(jax.vmap(batch))(rngs)
    looped = [jitted(rng) for rng in rngs]
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.map(lambda *x: np.stack(x), *looped), stacked
    )


def test_lengths_and_letters_are_uniform():
    found = jax.tree.map(np.asarray, jitted(jax.random.key(4), batch_size=6000))
    lengths, counts = np.unique(found.source_lengths, return_counts=True)
    assert lengths.tolist() == [2, 3, 4, 5, 6, 7]
    # 1000 each are expected; the standard deviation is 29.
    assert np.all(np.abs(counts - 1000) < 150)
    letters, counts = np.unique(found.source, return_counts=True)
    assert letters.tolist() == [PAD, *range(3, 11)]
    # 27000 letters, 3375 of each; the standard deviation is 54.
    assert np.all(np.abs(counts[1:] - 3375) < 300)
    # The letter at one place says nothing of its neighbour: 750 of 6000 pairs are equal, give or
    # take 26.
    assert abs(np.sum(found.source[:, 0] == found.source[:, 1]) - 750) < 150


@pytest.mark.parametrize("length", [1, 7])
def test_one_length(length):
    found = jitted(jax.random.key(5), min_length=length, max_length=length)
    assert np.all(found.source_lengths == length)
    check_rows(found, length)
