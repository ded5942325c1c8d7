"""Translation with a trained model, batch by batch, and the quality of translations."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.core.checks import check_integer, optional_package
from attention_jax.tasks.evaluation import best_answers
from attention_jax.tasks.translation.text import Subwords
from attention_jax.tasks.vocabulary import EOS, padded_rows, up_to_eos

Array = jax.Array
Params = Any

_WIDTH = 8  # sources are padded to a multiple of this, so that few shapes are compiled
_BATCH_TOKENS = 2048  # source tokens of a batch, padding included, times beams


class Translator(NamedTuple):
    """A trained model and its subwords."""

    task: Any  # a `Translation`
    params: Params  # of one seed
    subwords: Subwords


def translator_of(run: Any, seed_index: int = 0) -> Translator:
    """The model of one seed of a run that was trained or loaded.

    Args:
        run: from `train_run` or `load_run`.
        seed_index: which of the run's seeds, from 0.

    Raises:
        ValueError: there is no such seed, or the subwords in the run's folder are damaged or were
            replaced.
    """
    subwords = run.task.subwords(run.workdir)
    return Translator(run.task, run.params_of(seed_index), subwords)


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


def translate(
    translator: Translator,
    sentences: Sequence[str],
    search: Search = Search(),
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
    rows = [[*ids, EOS] for ids in translator.subwords.encode(sentences)]
    return translator.subwords.decode(_answers(translator, rows, search, progress))


def translated_ids(
    translator: Translator, sentence: str, search: Search = Search()
) -> tuple[list[int], list[int]]:
    """The ids of one sentence and of its translation, each up to EOS if it has one.

    Raises:
        ValueError: the sentence has no text.
    """
    (ids,) = translator.subwords.encode([sentence])
    if not ids:
        raise ValueError("sentence must have text; got none")
    row = [*ids, EOS]
    (answer,) = _answers(translator, [row], search)
    return row, up_to_eos(answer)


def _answers(
    translator: Translator,
    rows: Sequence[list[int]],
    search: Search,
    progress: Callable[[int], None] = lambda _: None,
) -> list[list[int]]:
    """The ids of the translations of rows of ids, EOS last; batches have rows of one width."""
    answers: list[list[int]] = [[] for _ in rows]
    width_of = [padded_width([row]) for row in rows]
    task = translator.task.model.known(translator.task)
    for width in sorted(set(width_of)):
        members = [index for index, row_width in enumerate(width_of) if row_width == width]
        size = 1 if len(rows) == 1 else max(1, _BATCH_TOKENS // (width * search.beams))
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            source = padded_rows([rows[index] for index in batch], size, width)
            found = np.asarray(_best(task, search, translator.params, *source))
            for row, index in enumerate(batch):
                if len(rows[index]) > 1:  # a row that is EOS alone has no text
                    answers[index] = found[row].tolist()
            progress(len(batch))
    return answers


def padded_width(rows: Sequence[list[int]]) -> int:
    """The width to which rows of ids, EOS last, are padded."""
    return _WIDTH * -(-max(map(len, rows)) // _WIDTH)


def longest_answer(width: int) -> int:
    """Most subwords of a translation, EOS included, for a source padded to `width`."""
    return 2 * width + 8


@functools.partial(jax.jit, static_argnums=(0, 1))
def _best(task: Any, search: Search, params: Params, source: Array, lengths: Array) -> Array:
    """The best translation of each row, int32 [B, longest_answer(S)]."""
    model = task.bind(params)
    longest = longest_answer(source.shape[1])
    return best_answers(model, source, lengths, max_length=longest, **dataclasses.asdict(search))


# --- quality ---


class TranslationScores(NamedTuple):
    """Percent, detokenised and cased. A signature names sacrebleu's settings and version."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score_translations(translations: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Scores of a whole text, with one reference per sentence.

    Raises:
        ValueError: the numbers of translations and references differ, or there are none, or
            sacrebleu is not installed.

    Source: Papineni et al. 2002 (BLEU); Popović 2015 (chrF); Post 2018 for the signatures.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"references must be one for each of the {len(translations)} translations, at least 1;"
            f" got {len(references)}"
        )
    metrics = require_sacrebleu()
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    hypotheses, streams = list(translations), [list(references)]
    return TranslationScores(
        bleu=bleu.corpus_score(hypotheses, streams).score,
        chrf=chrf.corpus_score(hypotheses, streams).score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def require_sacrebleu() -> Any:
    """The metrics of sacrebleu; raises ValueError unless it is installed."""
    return optional_package("sacrebleu.metrics", "BLEU", extra="translate")
