"""Accuracies of a trained sequence model, by length, and its answers to given sources."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer
from attention_jax.nn import Model, ModelConfig, bind
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Batch
from attention_jax.training.metrics import exact_match, token_accuracy

Array = jax.Array
Params = Any


class Accuracies(NamedTuple):
    """Three accuracies on examples of one length, each [seeds].

    Token accuracies count letters, not EOS; in an exact match every letter and EOS are correct.
    """

    teacher_forced_tokens: Array  # each letter predicted from the correct letters before it
    free_running_tokens: Array  # each letter predicted from the model's own letters
    free_running_exact: Array  # whole answers


def accuracies(
    task: Any,
    params: Params,
    lengths: Sequence[int],
    *,
    strings: int = 1000,
    seed: int = 0,
) -> dict[int, Accuracies]:
    """Accuracies by length, on fresh random examples, the same for all seeds and models.

    Sources are padded to the longest of training, because a model without a padding mask sees
    padding; longer sources are not padded. The accuracy at a length does not depend on the other
    lengths.

    Args:
        task: a `SequenceTask`.
        params: stacked over seeds.
        lengths: each at least 1.
        strings: how many examples of each length.
        seed: of the examples.

    Raises:
        ValueError: an argument is out of range.
    """
    check_integer("strings", strings)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be one or more, each at least 1; got {list(lengths)}")
    drawn = jax.jit(task.batch, static_argnames=("size", "length"))
    config, results = task.network.known(), {}
    for length in lengths:
        batch = drawn(jax.random.fold_in(jax.random.key(seed), length), size=strings, length=length)
        results[length] = _accuracies_of_length(config, task.vocabulary.size, params, batch)
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _accuracies_of_length(
    config: ModelConfig, vocabulary_size: int, params: Params, batch: Batch
) -> Accuracies:
    lengths = batch.target_lengths - 1  # letters

    def one_seed(params: Params) -> Accuracies:
        model = bind(config, params, vocabulary_size)
        forced = jnp.argmax(model(*batch.inputs), axis=-1)
        free = decoded(model, batch)
        return Accuracies(
            token_accuracy(forced, batch.targets, lengths),
            token_accuracy(free, batch.targets, lengths),
            exact_match(free, batch.targets, batch.target_lengths),
        )

    return jax.vmap(one_seed)(params)


def decoded(model: Model, batch: Batch) -> Array:
    """The model's own answers, by greedy search, int32 like the targets."""
    size = batch.targets.shape[1]
    return best_answers(model, batch.source, batch.source_lengths, max_length=size)


def best_answers(
    model: Model,
    source: Array,
    source_lengths: Array,
    *,
    max_length: int,
    sos: int = SOS,
    beams: int = 1,
    length_penalty: float = 0.0,
) -> Array:
    """Answers by greedy search, or the best of a beam: [B, max_length], with the source's dtype."""
    ends: Any = {"max_length": max_length, "sos": sos, "eos": EOS, "pad": PAD}
    if beams == 1:
        return model.greedy_decode(source, source_lengths, **ends).tokens
    search: Any = {"beams": beams, "length_penalty": length_penalty}
    found = model.beam_decode(source, source_lengths, **search, **ends)
    return found.tokens[:, 0].astype(source.dtype)
