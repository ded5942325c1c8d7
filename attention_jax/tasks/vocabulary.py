"""Letters, token ids and padded batches, which all tasks from sequence to sequence share."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.core.serialization import exported
from attention_jax.training.task import Labels

Array = jax.Array

PAD, SOS, EOS = 0, 1, 2  # padding, start of sequence, end of sequence
FIRST = 3  # the id of the first letter


@exported
class Batch(NamedTuple):
    """Padded pairs of sequences; S is the longest source, T the longest target with its EOS."""

    source: Array  # int32 [B, S], then PAD
    source_lengths: Array  # int32 [B]
    target_inputs: Array  # int32 [B, T]: SOS, then the target, then PAD
    targets: Array  # int32 [B, T]: the target, then EOS, then PAD
    target_lengths: Array  # int32 [B], EOS included

    @property
    def inputs(self) -> tuple[Array, Array, Array]:
        """The arguments of the model."""
        return self.source, self.source_lengths, self.target_inputs

    @property
    def num_tokens(self) -> int:
        """The positions of source and target, padding included."""
        return sum(math.prod(ids.shape[:2]) for ids in (self.source, self.target_inputs))


def padded_batch(
    source: Sequence[Sequence[int]],
    target: Sequence[Sequence[int]],
    batch_size: int = 0,
    source_width: int = 0,
    target_width: int = 0,
) -> Batch:
    """A `Batch` of NumPy arrays.

    Args:
        source: rows of ids.
        target: rows of ids, EOS last.
        batch_size: surplus rows are empty; 0 for none.
        source_width: S; 0 for the longest source.
        target_width: T; 0 for the longest target.
    """
    batch_size = batch_size or len(source)
    targets, target_lengths = padded_rows(target, batch_size, target_width)
    inputs = np.concatenate([np.full((batch_size, 1), SOS, np.int32), targets[:, :-1]], axis=1)
    arrays: Any = padded_rows(source, batch_size, source_width)
    arrays += (np.where(inputs == EOS, PAD, inputs), targets, target_lengths)
    return Batch(*arrays)


def padded_rows(
    rows: Sequence[Sequence[int]], batch_size: int, width: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as int32 [batch_size, width], and their lengths int32 [batch_size]."""
    padded = np.full((batch_size, width or max(map(len, rows))), PAD, np.int32)
    lengths = np.zeros(batch_size, np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        lengths[index] = len(row)
    return padded, lengths


def labels_of(
    batch: Batch,
    count: int,
    text: Callable[[list[int]], str],
    label: Callable[[int], str],
    *,
    mask_padding: bool,
) -> Labels:
    """The labels of the first rows of a batch, named after the text that each row reads.

    Args:
        batch: the batch; where it has no source, the target's inputs are read.
        count: of rows.
        text: the text of ids.
        label: the label of an id.
        mask_padding: whether the model masks padding; if not, padding has columns too.
    """
    labels: Labels = {}
    read, lengths = batch.source, batch.source_lengths
    if not read.shape[1]:
        read, lengths = batch.target_inputs, batch.target_lengths
    for row in range(count):
        columns = np.asarray(read[row]).tolist()[: int(lengths[row]) if mask_padding else None]
        rows = np.asarray(batch.targets[row]).tolist()[: int(batch.target_lengths[row])]
        name = text(columns)
        name = name if name not in labels else f"{name} ({row})"
        labels[name] = [*map(label, rows)], [*map(label, columns)]
    return labels


def up_to_eos(ids: Sequence[int]) -> list[int]:
    """The ids up to the first EOS, with it; all ids if there is none."""
    tokens = [int(token) for token in ids]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The ids 0, 1, 2 are PAD, SOS, EOS; the letters of `alphabet` follow in order from `FIRST`.

    Attributes:
        alphabet: the letters, each once.

    >>> Vocabulary("abc").encode("cab")
    [5, 3, 4]
    >>> Vocabulary("abc").decode([5, 3, 4, 2, 0, 0])
    'cab'
    """

    alphabet: str = "abcdefghijklmnopqrstuvwxyz"

    def __post_init__(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet must be distinct letters; got {self.alphabet!r}")

    @property
    def size(self) -> int:
        """Number of ids, the three special ones included."""
        return FIRST + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """One id per letter, without SOS or EOS."""
        for letter in text:
            if letter not in self.alphabet:
                raise ValueError(
                    f"text must consist of letters of {self.alphabet!r}; got {letter!r} in {text!r}"
                )
        return [FIRST + self.alphabet.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The letters up to the first EOS; PAD and SOS are left out."""
        return "".join(self.alphabet[token - FIRST] for token in up_to_eos(ids) if token >= FIRST)

    def label(self, token: int) -> str:
        """The label of a token in figures: the letter itself, or PAD, SOS, EOS."""
        special = {PAD: "PAD", SOS: "SOS", EOS: "EOS"}
        return special.get(token) or self.alphabet[token - FIRST]
