"""String reversal: batches drawn on the device, as a pure function of a PRNG key."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from attention_jax.tasks.batch import Batch
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Vocabulary

Array = jax.Array


@functools.partial(
    jax.jit,
    static_argnames=("vocabulary", "batch_size", "min_length", "max_length", "source_start"),
)
def random_batch(
    rng: Array,
    *,
    vocabulary: Vocabulary,
    batch_size: int,
    min_length: int,
    max_length: int,
    source_start: bool,
) -> Batch:
    """Random strings, lengths uniform in [min_length, max_length], and their reversals.

    Args:
        rng: one PRNG key; the same key gives the same strings.
        vocabulary: letters are drawn uniformly from its alphabet.
        batch_size: B.
        min_length: shortest string, at least 1.
        max_length: longest string.
        source_start: as in `reversal_batch`.

    Returns:
        a `Batch` as `reversal_batch` makes it, padded to `max_length` letters.

    >>> batch = random_batch(
    ...     jax.random.key(0), vocabulary=Vocabulary(), batch_size=2, min_length=3, max_length=3,
    ...     source_start=True)
    >>> [Vocabulary().decode(ids) for ids in (*batch.source, *batch.targets)]
    ['sky', 'llt', 'yks', 'tll']
    >>> batch.source_lengths.tolist()  # of three letters and SOS
    [4, 4]
    """
    length_rng, letter_rng = jax.random.split(rng)
    lengths = jax.random.randint(length_rng, (batch_size,), min_length, max_length + 1)
    first_letter = vocabulary.size - len(vocabulary.alphabet)
    letters = jax.random.randint(
        letter_rng, (batch_size, max_length), first_letter, vocabulary.size
    )
    return reversal_batch(letters, lengths, source_start=source_start)


@functools.partial(jax.jit, static_argnames="source_start")
def reversal_batch(letters: Array, lengths: Array, *, source_start: bool) -> Batch:
    """A batch of given strings and their reversals.

    Args:
        letters: int32 [B, L], ids of letters; entries from `lengths` on are ignored.
        lengths: int32 [B], 0 <= length <= L.
        source_start: whether each source begins with SOS, a key for the query that writes EOS.

    Returns:
        a `Batch` with T = L + 1, room for EOS. S is L + 1 with `source_start` and L without, and
        `source_lengths` include SOS.
    """
    batch_size, max_length = letters.shape
    ends = lengths[:, None]
    positions = jnp.arange(max_length + 1)[None, :]
    letters = jnp.pad(letters, ((0, 0), (0, 1)))
    mirrored = jnp.take_along_axis(letters, jnp.maximum(ends - 1 - positions, 0), axis=1)
    targets = jnp.where(positions < ends, mirrored, PAD)
    start = jnp.full((batch_size, 1), SOS, letters.dtype)
    source = jnp.where(positions < ends, letters, PAD)[:, :max_length]
    return Batch(
        source=jnp.concatenate([start, source], axis=1) if source_start else source,
        source_lengths=lengths + int(source_start),
        target_inputs=jnp.concatenate([start, targets[:, :max_length]], axis=1),
        targets=jnp.where(positions == ends, EOS, targets),
        target_lengths=lengths + 1,
    )
