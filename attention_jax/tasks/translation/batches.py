"""Batches of sentence pairs, of few shapes, in an order that (seed, epoch) determines."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from attention_jax.tasks.translation.text import ParallelText, Subwords
from attention_jax.tasks.vocabulary import EOS, Batch, padded_batch

Ids = list[int]


class Pairs(NamedTuple):
    """Sentences as ids, EOS last, and the number of pairs that were left out."""

    source: list[Ids]
    target: list[Ids]
    skipped: int


class Bucket(NamedTuple):
    """Pairs of similar length, whose batches have one shape."""

    rows: np.ndarray  # int [n], indices of pairs
    source_width: int  # S, the longest of them
    target_width: int  # T
    batch_size: int  # B
    batches: int  # per epoch


def encode_pairs(text: ParallelText, subwords: Subwords, max_tokens: int) -> Pairs:
    """Encodes the pairs of a text, and leaves out those that are empty or too long.

    Args:
        text: all pairs.
        subwords: of both languages.
        max_tokens: most subwords of a sentence, EOS not counted.

    Raises:
        ValueError: no pair is left.
    """
    encoded = zip(subwords.encode(text.source), subwords.encode(text.target), strict=True)
    kept = [pair for pair in encoded if all(pair) and max(map(len, pair)) <= max_tokens]
    skipped = len(text.source) - len(kept)
    if not kept:
        raise ValueError(
            f"no pair of sentences is left to learn from: {skipped} have an empty side, or more"
            f" than max_tokens {max_tokens} subwords"
        )
    source, target = ([[*ids, EOS] for ids in side] for side in zip(*kept, strict=True))
    return Pairs(source, target, skipped)


# For each batch of an epoch, the number of its bucket and the indices of its pairs.
_Epoch = list[tuple[int, np.ndarray]]


class Batches:
    """An endless sequence of batches; each epoch has each pair once, in a new order.

    Pairs are put in buckets by length, to keep padding low and shapes few: XLA compiles one program
    per shape. The bucket of a batch depends on the epoch alone, so that several seeds can be
    trained at once; its pairs depend on (seed, epoch). The number of steps done is the whole state,
    so that a run can stop and resume at any step.

    Args:
        pairs: the pairs of a text.
        tokens: most subwords of a batch, both sides and padding included; a batch has at least one
            pair. Rows added by `multiple_of` do not count.
        most_pairs: of a batch; None for as many as `tokens` allows.
        buckets: most buckets.
        multiple_of: batches are filled up with empty pairs to a multiple of this size; their real
            pairs do not depend on it.
    """

    def __init__(
        self,
        pairs: Pairs,
        *,
        tokens: int,
        most_pairs: int | None = None,
        buckets: int = 6,
        multiple_of: int = 1,
    ):
        self._pairs = pairs
        self.buckets = _buckets(pairs, tokens, most_pairs or tokens, buckets, multiple_of)
        self.steps_per_epoch = sum(bucket.batches for bucket in self.buckets)
        self._epochs: dict[int, tuple[int, _Epoch]] = {}  # of each seed, the last that was drawn

    @property
    def description(self) -> str:
        """The numbers of pairs, batches and shapes, in one line for the user."""
        skipped = self._pairs.skipped
        return (
            f"{len(self._pairs.source)} pairs of sentences"
            + (f", {skipped} left out (a side empty, or longer than max_tokens)" if skipped else "")
            + f"; {self.steps_per_epoch} batches per epoch, of {len(self.buckets)} shapes"
        )

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a seed and a step, as NumPy arrays; surplus rows are empty."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if seed not in self._epochs or self._epochs[seed][0] != epoch:
            self._epochs[seed] = epoch, self._drawn_epoch(seed, epoch)
        bucket, rows = self._epochs[seed][1][index]
        shape = self.buckets[bucket]
        source, target = ([side[row] for row in rows] for side in self._pairs[:2])
        return padded_batch(
            source, target, shape.batch_size, shape.source_width, shape.target_width
        )

    def _drawn_epoch(self, seed: int, epoch: int) -> _Epoch:
        parts: list[Iterator[np.ndarray]] = []
        for number, bucket in enumerate(self.buckets):
            order = _shuffled(len(bucket.rows), seed, epoch, number)
            # Equal parts, up to one pair, so that no batch is a small remainder.
            parts.append(iter(np.array_split(bucket.rows[order], bucket.batches)))
        turns = np.repeat(np.arange(len(parts)), [bucket.batches for bucket in self.buckets])
        turns = turns[_shuffled(len(turns), 0, epoch, len(parts))]
        return [(int(turn), next(parts[turn])) for turn in turns]


def best_widths(lengths: np.ndarray, count: int) -> list[int]:
    """At most `count` widths, ascending, for which padding the lengths takes the fewest tokens.

    Found by dynamic programming over the distinct lengths.

    >>> best_widths(np.array([3, 3, 4, 9, 10]), 2)
    [4, 10]
    """
    sizes, numbers = np.unique(lengths, return_counts=True)
    up_to = np.concatenate([[0], np.cumsum(numbers)])
    # After n rounds, cost[j] is the cost of the j smallest sizes in n buckets; the last of these
    # buckets begins after the cuts[n - 1][j - 1] smallest sizes.
    cost = np.concatenate([[0], np.full(len(sizes), np.inf)])
    cuts: list[np.ndarray] = []
    for _ in range(min(count, len(sizes))):
        added = sizes[None, :] * (up_to[None, 1:] - up_to[:-1, None])  # [from, to]
        added = np.where(np.tri(len(sizes), dtype=bool).T, added, np.inf)
        totals = cost[:-1, None] + added
        cuts.append(np.argmin(totals, axis=0))
        cost = np.concatenate([[np.inf], np.min(totals, axis=0)])
    widths, end = [], len(sizes)
    for cut in reversed(cuts):
        widths.append(int(sizes[end - 1]))
        end = int(cut[end - 1])
    return widths[::-1]


def _buckets(
    pairs: Pairs, tokens: int, most_pairs: int, count: int, multiple_of: int
) -> tuple[Bucket, ...]:
    sides = [np.array([len(ids) for ids in side]) for side in pairs[:2]]
    longer = np.maximum(*sides)
    buckets, shorter_than = [], 0
    for width in best_widths(longer, count):
        rows = np.flatnonzero((longer > shorter_than) & (longer <= width))
        source_width, target_width = (int(side[rows].max()) for side in sides)
        most = max(1, min(most_pairs, tokens // (source_width + target_width)))
        batches = -(-len(rows) // most)
        batch_size = -(-len(rows) // batches)
        batch_size = -(-batch_size // multiple_of) * multiple_of
        buckets.append(Bucket(rows, source_width, target_width, batch_size, batches))
        shorter_than = width
    return tuple(buckets)


def _shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation that depends on the key alone, in any version of NumPy."""
    entropy = np.random.SeedSequence(list(key))
    return np.argsort(np.random.Philox(entropy).random_raw(count), kind="stable")
