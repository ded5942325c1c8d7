"""Evaluation of a trained reversal model: accuracies by length, and single words."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.nn import Decoded, Model
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import random_batch, reversal_batch
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalRun, bind
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from attention_jax.training.metrics import exact_match, token_accuracy

Array = jax.Array
Params = Any


# Labels for the axes of `plotting.weight_heatmaps`.
LETTER_AXES: dict[str, Any] = {"ylabel": "letter written (query)", "xlabel": "source letter (key)"}


class Evaluation(NamedTuple):
    """Three accuracies on strings of one length, each [seeds].

    Token accuracies count letters, not EOS; in an exact match every letter and EOS are correct.
    """

    teacher_forced_tokens: Array  # each letter predicted from the correct letters before it
    free_running_tokens: Array  # each letter predicted from the model's own letters
    free_running_exact: Array  # whole strings


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(config: ModelConfig, beams: int, params: Params, batch: Batch) -> Evaluation:
    lengths = batch.target_lengths - 1  # letters

    def one_seed(params: Params) -> Evaluation:
        model = bind(config, params)
        logits = model(batch.source, batch.source_lengths, batch.target_inputs)
        forced = jnp.argmax(logits, axis=-1)
        free = decode(model, batch, beams=beams).tokens
        return Evaluation(
            token_accuracy(forced, batch.targets, lengths),
            token_accuracy(free, batch.targets, lengths),
            exact_match(free, batch.targets, batch.target_lengths),
        )

    return jax.vmap(one_seed)(params)


def evaluate(
    trained: ReversalRun,
    *,
    lengths: Sequence[int],
    strings: int = 1000,
    seed: int = 0,
    beams: int = 1,
) -> dict[int, Evaluation]:
    """Accuracies by length, on fresh random strings, the same for all seeds and scores.

    Strings are padded to the longest of training, which a model without a padding mask sees; longer
    strings are not padded. So the accuracy at a length does not depend on the other lengths.

    Args:
        trained: the run.
        lengths: lengths of strings, each at least 1.
        strings: how many of each length.
        seed: of the strings.
        beams: partial answers kept at each step of the search; 1 is greedy.

    Raises:
        ValueError: an argument is out of range.
    """
    check_beams(beams)
    check_integer("strings", strings)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be one or more, each at least 1; got {list(lengths)}")
    results = {}
    for length in lengths:
        rng = jax.random.fold_in(jax.random.key(seed), length)
        batch = random_batch(
            rng,
            vocabulary=trained.config.drawn,
            batch_size=strings,
            min_length=length,
            max_length=length,
            source_start=trained.config.source_start,
        )
        more = ((0, 0), (0, max(0, trained.config.max_length - length)))
        batch = batch._replace(
            source=jnp.pad(batch.source, more),
            target_inputs=jnp.pad(batch.target_inputs, more),
            targets=jnp.pad(batch.targets, more),
        )
        results[length] = _evaluate(trained.config.model.known(), beams, trained.params, batch)
    return results


def decode(model: Model, batch: Batch, *, beams: int = 1, return_weights: bool = False) -> Decoded:
    """The model's own answer, by greedy search or the best of a beam, up to the targets' length."""
    source = (batch.source, batch.source_lengths)
    ends: Any = {"max_length": batch.targets.shape[1], "sos": SOS, "eos": EOS, "pad": PAD}
    if beams == 1:
        return model.greedy_decode(*source, **ends, return_weights=return_weights)
    best = model.beam_decode(*source, beams=beams, **ends).tokens[:, 0].astype(batch.source.dtype)
    return Decoded(best, model.weights_of(*source, best, sos=SOS) if return_weights else None)


def check_beams(beams: int) -> None:
    """Raises ValueError unless `beams` is a positive integer."""
    check_integer("beams", beams)


def batch_of_words(words: Sequence[str], *, source_start: bool, width: int = 0) -> Batch:
    """Words, padded to the longest or to `width` letters, and their reversals.

    See `reversal_batch`. A model without a padding mask needs the width of its training.

    Raises:
        ValueError: a word has a letter outside the vocabulary.
    """
    ids = [VOCABULARY.encode(word) for word in words]
    width = max(width, *map(len, ids))
    letters = np.array([row + [PAD] * (width - len(row)) for row in ids], np.int32)
    lengths = np.array([len(row) for row in ids], np.int32)
    return reversal_batch(letters, lengths, source_start=source_start)


class Reversed(NamedTuple):
    """A word, the model's answer, and the attention weights."""

    word: str
    answer: str
    weights: Array  # [letters of the answer, and EOS if it is there; tokens of the source]

    @property
    def column_labels(self) -> list[str]:
        """The source token of each column of `weights`: the letters, behind SOS if it is there."""
        return [*[VOCABULARY.label(SOS)] * (self.weights.shape[1] - len(self.word)), *self.word]

    @property
    def row_labels(self) -> list[str]:
        """The token that each row of `weights` predicts."""
        return [*self.answer, VOCABULARY.label(EOS)][: self.weights.shape[0]]


def reverse(
    trained: ReversalRun,
    words: Sequence[str],
    *,
    seed_index: int = 0,
    beams: int = 1,
) -> list[Reversed]:
    """Reverses words with one of the trained seeds, greedily or by a beam search.

    Words are padded to the longest of training, or to the longest of them if it is longer.

    Raises:
        ValueError: there are no words or no such seed; a word is empty or has a letter outside the
            vocabulary.
    """
    if not words or not all(words):
        raise ValueError(f"words must be one or more, none of them empty; got {list(words)}")
    if not 0 <= seed_index < trained.config.loop.seeds:
        raise ValueError(
            f"seed_index must be from 0 to {trained.config.loop.seeds - 1}; got {seed_index}"
        )
    check_beams(beams)
    source_start = trained.config.source_start
    batch = batch_of_words(words, source_start=source_start, width=trained.config.max_length)

    @jax.jit
    def decode_words(params: Any, seed_index: Array) -> Decoded:
        params = jax.tree.map(lambda leaf: leaf[seed_index], params)
        model = bind(trained.config.model, params)
        return decode(model, batch, beams=beams, return_weights=True)

    decoded = jax.tree.map(np.asarray, decode_words(trained.params, jnp.int32(seed_index)))
    answers = []
    for row, word in enumerate(words):
        tokens = decoded.tokens[row].tolist()
        end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        # A model that has learned little may predict PAD or SOS, which are not letters.
        steps = [step for step in range(end) if tokens[step] not in (PAD, SOS)]
        weights = decoded.weights[-1, row, np.array(steps, int), : len(word) + int(source_start)]
        answers.append(Reversed(word, VOCABULARY.decode(tokens), jnp.asarray(weights)))
    return answers
