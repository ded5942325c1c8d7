"""Translation with a trained model: sentences in, sentences out, batch by batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.nn.decoding import BeamResult
from attention_jax.runs.run_folder import RunFolder
from attention_jax.tasks.translation.batches import Ids, padded_sources
from attention_jax.tasks.translation.task import TranslationConfig, Vocabularies, bind
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from attention_jax.training.run import TrainedRun

Array = jax.Array
Params = Any

# Sources of several sentences are padded to a multiple of this, to compile for few shapes.
WIDTH = 8
_BATCH_TOKENS = 2048  # source tokens of a batch, padding included, times beams


class Translator(NamedTuple):
    """A trained model and its vocabularies."""

    config: TranslationConfig
    params: Params  # of one seed
    vocabularies: Vocabularies


def translator_of(run: TrainedRun[TranslationConfig], seed_index: int = 0) -> Translator:
    """The model of one seed of a run that was trained or loaded.

    Args:
        run: from `train_run` or `load_run`.
        seed_index: which of the run's seeds, from 0.

    Raises:
        ValueError: there is no such seed, or the vocabularies in the run's folder are damaged or
            were replaced.
    """
    config, workdir = run.config, run.workdir
    if workdir is None:
        raise ValueError("run must have a folder, which holds its vocabularies; got workdir None")
    if not 0 <= seed_index < config.loop.seeds:
        raise ValueError(f"seed_index must be from 0 to {config.loop.seeds - 1}; got {seed_index}")
    vocabularies = Vocabularies.kept(config, workdir)
    if vocabularies.digests != RunFolder(workdir).read_config().get("subwords_sha256"):
        raise ValueError(f"workdir {workdir}: its subwords are not those that it was trained with")
    params = jax.tree.map(lambda leaf: leaf[seed_index], run.params)
    return Translator(config, params, vocabularies)


@dataclasses.dataclass(frozen=True)
class Search:
    """Settings of the beam search.

    Attributes:
        beams: partial translations kept at each step; 1 is greedy search.
        length_penalty: larger values prefer longer translations; see `beam_search`.
    """

    beams: int = 1
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_integer("beams", self.beams)
        if not 0 <= self.length_penalty < float("inf"):
            raise ValueError(f"length_penalty must be at least 0; got {self.length_penalty}")


# Greedy search: one beam.
GREEDY = Search()


class Aligned(NamedTuple):
    """A translation, and the cross-attention weights between its subwords and the source's."""

    translation: str
    source_labels: list[str]  # [S], EOS last
    target_labels: list[str]  # [T], EOS last
    weights: np.ndarray  # [L, T, S], of each decoder layer, mean over heads


def translate(
    translator: Translator,
    sentences: Sequence[str],
    search: Search = GREEDY,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Translates sentences, in order; a sentence without text becomes "".

    Args:
        translator: the model.
        sentences: in the source language.
        search: settings of the search.
        progress: called after each batch with its number of sentences.
    """
    answers: list[list[int]] = [[] for _ in sentences]
    for index, tokens in _decoded(translator, sentences, search, _best, progress):
        answers[index] = tokens.tolist()
    return translator.vocabularies.target.decode(answers)


class Hypothesis(NamedTuple):
    """A translation that beam search has found."""

    translation: str
    score: float  # log-probability over length penalty, see `beam_search`
    log_probability: float  # nats


def translate_n_best(
    translator: Translator,
    sentences: Sequence[str],
    search: Search,
    *,
    count: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[list[Hypothesis]]:
    """The best translations of each sentence, best first; none for a sentence without text.

    Args:
        translator, sentences, search, progress: as in `translate`.
        count: how many of the beams; a sentence has fewer if fewer translations exist. Two may read
            the same, in other subwords.

    Raises:
        ValueError: `count` is not from 1 to the number of beams.
    """
    check_n_best(count, search)
    found: list[list[Hypothesis]] = [[] for _ in sentences]
    for index, result in _decoded(translator, sentences, search, _beams, progress):
        exists = np.flatnonzero(np.isfinite(result.scores[:count]))
        texts = translator.vocabularies.target.decode(result.tokens[exists])
        numbers = zip(result.scores[exists], result.log_probabilities[exists], strict=True)
        found[index] = [
            Hypothesis(text, float(score), float(log_probability))
            for text, (score, log_probability) in zip(texts, numbers, strict=True)
        ]
    return found


def check_n_best(count: int, search: Search) -> None:
    """Raises ValueError unless the search keeps so many translations."""
    check_integer("n_best", count)
    if count > search.beams:
        raise ValueError(f"n_best must be at most beams {search.beams}; got {count}")


def _decoded(
    translator: Translator,
    sentences: Sequence[str],
    search: Search,
    decode: Callable[..., Any],
    progress: Callable[[int], None],
) -> Iterator[tuple[int, Any]]:
    """(index, what `decode` finds for it) of each sentence with text, batch by batch by length."""
    rows = [[*ids, EOS] for ids in translator.vocabularies.source.encode(sentences)]
    width_of = [-(-len(row) // WIDTH) * WIDTH for row in rows]
    config = translator.config.model.known(translator.config)
    for width in sorted(set(width_of)):
        members = [index for index, row_width in enumerate(width_of) if row_width == width]
        size = max(1, _BATCH_TOKENS // (width * search.beams))
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            source = padded_sources([rows[index] for index in batch], size, width)
            found = jax.tree.map(np.asarray, decode(config, search, translator.params, *source))
            for row, index in enumerate(batch):
                if len(rows[index]) > 1:  # a row that is EOS alone has no text
                    yield index, jax.tree.map(lambda leaf: leaf[row], found)  # noqa: B023
            progress(len(batch))


def align(translator: Translator, sentence: str, search: Search = GREEDY) -> Aligned:
    """Translates one sentence and returns the attention weights too.

    Raises:
        ValueError: the sentence has no text.
    """
    source, target = translator.vocabularies
    row, answer = translated_ids(translator, sentence, search)
    (text,) = target.decode([answer])
    weights = weights_of(translator, row, answer)
    return Aligned(text, source.labels(row), target.labels(answer), weights)


def translated_ids(
    translator: Translator, sentence: str, search: Search = GREEDY, *, multiple: int = 1
) -> tuple[Ids, Ids]:
    """The ids of one sentence and of its translation, each up to EOS if it has one.

    Args:
        translator: the model.
        sentence: in the source language.
        search: settings of the search.
        multiple: the source is padded to a multiple of this, to compile for few shapes; the
            longest answer grows with it.

    Raises:
        ValueError: the sentence has no text.
    """
    (ids,) = translator.vocabularies.source.encode([sentence])
    if not ids:
        raise ValueError("sentence must have text; got none")
    row = [*ids, EOS]
    width = -(-len(row) // multiple) * multiple
    arrays = padded_sources([row], 1, width)
    config = translator.config.model.known(translator.config)
    tokens = np.asarray(_best(config, search, translator.params, *arrays))[0]
    answer = tokens.tolist()
    return row, answer[: answer.index(EOS) + 1] if EOS in answer else answer


def weights_of(translator: Translator, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Cross-attention weights [L, T, S] of a source and a translation, as ids with EOS last."""
    arrays = padded_sources([list(source)], 1, len(source))
    tokens = jnp.asarray([list(target)], jnp.int32)
    config = translator.config.model.known(translator.config)
    return np.asarray(_weights(config, translator.params, *arrays, tokens))[:, 0]


def longest_answer(width: int) -> int:
    """Most subwords of a translation, EOS included, for a source padded to `width`."""
    return 2 * width + 8


@functools.partial(jax.jit, static_argnums=(0, 1))
def _best(
    config: TranslationConfig, search: Search, params: Params, source: Array, lengths: Array
) -> Array:
    """The best translation of each row, int32 [B, longest_answer(S)]."""
    if search.beams > 1:
        return _beams(config, search, params, source, lengths).tokens[:, 0]
    ends = _ends(source)
    return bind(config, params).greedy_decode(source, lengths, **ends).tokens


@functools.partial(jax.jit, static_argnums=(0, 1))
def _beams(
    config: TranslationConfig, search: Search, params: Params, source: Array, lengths: Array
) -> BeamResult:
    """All beams of each row, best first."""
    return bind(config, params).beam_decode(
        source, lengths, **dataclasses.asdict(search), **_ends(source)
    )


def _ends(source: Array) -> Any:
    return {"max_length": longest_answer(source.shape[1]), "sos": SOS, "eos": EOS, "pad": PAD}


@functools.partial(jax.jit, static_argnums=0)
def _weights(
    config: TranslationConfig, params: Params, source: Array, lengths: Array, tokens: Array
) -> Array:
    return bind(config, params).weights_of(source, lengths, tokens, sos=SOS)
