"""Translating with a trained model: sentences in, sentences out, a batch at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.tasks.translation.batches import padded_sources
from attention_jax.tasks.translation.task import TranslationConfig, Vocabularies, bind
from attention_jax.tasks.vocabulary import EOS, PAD, SOS

Array = jax.Array
Params = Any

_WIDTH = 8  # sources are padded to a multiple of this: few shapes, each compiled once
_BATCH_TOKENS = 2048  # source tokens of a batch, padding included, times beams


class Translator(NamedTuple):
    """A model, and how its ids are text."""

    config: TranslationConfig
    params: Params  # of one seed
    vocabularies: Vocabularies


@dataclasses.dataclass(frozen=True)
class Search:
    """How an answer is searched for.

    Attributes:
        beams: how many beginnings of a translation are kept; 1 is greedy.
        length_penalty: the larger, the longer the translations preferred; see `beam_search`.
    """

    beams: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_integer("beams", self.beams)
        if not 0 <= self.length_penalty < float("inf"):
            raise ValueError(f"length_penalty must be at least 0; got {self.length_penalty}")


GREEDY = Search()


class Aligned(NamedTuple):
    """A sentence, its translation, and where the decoder looked, in subwords."""

    translation: str
    source_labels: list[str]  # [S], EOS last
    target_labels: list[str]  # [T], EOS last
    weights: np.ndarray  # [L, T, S], the cross attention of each decoder layer, mean over heads


def translate(
    translator: Translator,
    sentences: Sequence[str],
    search: Search = GREEDY,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Translations of sentences, in order; of one without text, "".

    Args:
        translator: the model.
        sentences: in the source language.
        search: how.
        progress: told how many more are done, batch by batch.
    """
    rows = [[*ids, EOS] for ids in translator.vocabularies.source.encode(sentences)]
    answers: list[list[int]] = [[] for _ in rows]
    width_of = [-(-len(row) // _WIDTH) * _WIDTH for row in rows]
    for width in sorted(set(width_of)):
        members = [index for index, one in enumerate(width_of) if one == width]
        size = max(1, _BATCH_TOKENS // (width * search.beams))
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            source = padded_sources([rows[index] for index in batch], size, width)
            found = np.asarray(_decode(translator.config, search, translator.params, *source))
            for index, tokens in zip(batch, found, strict=False):
                # Nothing to say is said of nothing: a row that is EOS alone has no text.
                answers[index] = tokens.tolist() if len(rows[index]) > 1 else []
            progress(len(batch))
    return translator.vocabularies.target.decode(answers)


def align(translator: Translator, sentence: str, search: Search = GREEDY) -> Aligned:
    """One sentence's translation, and the weights with which it is found.

    Raises:
        ValueError: the sentence has no text.
    """
    source, target = translator.vocabularies
    (ids,) = source.encode([sentence])
    if not ids:
        raise ValueError("sentence must have text; got none")
    row = [*ids, EOS]
    arrays = padded_sources([row], 1, len(row))
    tokens = np.asarray(_decode(translator.config, search, translator.params, *arrays))[0]
    (text,) = target.decode([tokens.tolist()])
    said = tokens.tolist()
    said = said[: said.index(EOS) + 1] if EOS in said else said
    weights = weights_of(translator, row, said)
    return Aligned(text, source.labels(row), target.labels(said), weights)


def weights_of(translator: Translator, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Cross-attention weights [L, T, S] of one row of ids that gives another, EOS last in both."""
    arrays = padded_sources([list(source)], 1, len(source))
    tokens = jnp.asarray([list(target)], jnp.int32)
    return np.asarray(_weights(translator.config, translator.params, *arrays, tokens))[:, 0]


def longest_answer(width: int) -> int:
    """Subwords that a translation may have, EOS included, of a source of so many."""
    return 2 * width + 8


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(
    config: TranslationConfig, search: Search, params: Params, source: Array, lengths: Array
) -> Array:
    """int32 [B, longest_answer]"""
    model = bind(config, params)
    ends: Any = {"max_length": longest_answer(source.shape[1]), "sos": SOS, "eos": EOS, "pad": PAD}
    if search.beams == 1:
        return model.greedy_decode(source, lengths, **ends).tokens
    found = model.beam_decode(
        source, lengths, beams=search.beams, length_penalty=search.length_penalty, **ends
    )
    return found.tokens[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def _weights(
    config: TranslationConfig, params: Params, source: Array, lengths: Array, tokens: Array
) -> Array:
    return bind(config, params).weights_of(source, lengths, tokens, sos=SOS)
