"""Translating, a batch at a time, against the model's search for one sentence alone."""

import functools
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sacrebleu
from translation_cases import repeating

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.translation import translate as translating
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.text import Subwords
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    longest_answer,
    require_sacrebleu,
    score_translations,
    translate,
    translated_ids,
)
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, padded_rows, up_to_eos

SIZE = 300
WORDS = ["der hund bellt", "die katze schläft im haus", "ein kind spielt", "im garten"] * 4
# Of up to 8 subwords or of up to 16, EOS counted, and of none.
SENTENCES = ["ein hund", "", "der garten im haus", "im", "katze", "das kind bellt", "kind", ""]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Five rows of width 8, two of width 16."""
    monkeypatch.setattr(translating, "_BATCH_TOKENS", 40)


@pytest.fixture(scope="module")
def translator():
    """A model that nobody trained, with parameters large enough for different answers."""
    sizes = {"num_heads": 2, "dim": 8, "hidden_dim": 13, "encoder_layers": 0}
    task = Translation(
        source=Path("a.de"),
        target=Path("a.en"),
        vocabulary_size=SIZE,
        model=ModelConfig(**sizes, dropout_rate=0.5, tied_embeddings="all"),
    )
    params = jax.jit(task.init)(jax.random.key(6))
    params = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params)
    return Translator(task, params, Subwords.learned(WORDS, SIZE))


@functools.partial(jax.jit, static_argnames=("task", "most", "beams", "length_penalty"))
def decoded(task, params, source, lengths, most, **search):
    ends = {"max_length": most, "sos": SOS, "eos": EOS, "pad": PAD}
    return task.bind(params).beam_decode(source, lengths, **search, **ends).tokens[:, 0]


def answer_alone(translator, ids, beams=1, length_penalty=0.0):
    """The model's answer to one sentence, with other padding than that of its batch."""
    most = longest_answer(-(-len(ids) // 8) * 8)
    source = padded_rows([ids], 1, 19)
    search = {"beams": beams, "length_penalty": length_penalty}
    found = decoded(translator.task, translator.params, *source, most, **search)
    return up_to_eos(found[0])


def ids_of(translator, sentence):
    return [*translator.subwords.encode([sentence])[0], EOS]


# --- sentences ---


def test_each_translation_is_the_models_own_and_in_its_place(translator):
    sentences, counts = [*SENTENCES, *SENTENCES[::-1], SENTENCES[0]], []
    found = translate(translator, sentences, progress=counts.append)
    assert sum(counts) == len(sentences)
    assert max(counts) == 5
    assert len(counts) > 4
    alone = {"": ""}
    for sentence in filter(None, SENTENCES):
        answer = answer_alone(translator, ids_of(translator, sentence))
        (alone[sentence],) = translator.subwords.decode([answer])
    assert found == [alone[sentence] for sentence in sentences]
    assert len(set(found)) == 7  # they differ: one in another's place would be seen
    assert translate(translator, ["", " "]) == ["", ""]


def test_beams_are_those_of_the_model_alone(translator):
    search, sentences = {"beams": 2, "length_penalty": 2.5}, ["ein hund", "katze", "im"]
    found = translate(translator, sentences, Search(**search))
    alone = [answer_alone(translator, ids_of(translator, each), **search) for each in sentences]
    assert found == translator.subwords.decode(alone)
    assert found != translate(translator, sentences)


def test_the_longest_answer(translator):
    word = ids_of(translator, "im")[0]
    talkative = translator._replace(params=repeating(translator.params, word))
    letters = translator.subwords.decode([[word]])[0]
    assert len(ids_of(translator, "im")) < 8 < len(ids_of(translator, "der garten im haus")) < 16
    short, long = translate(talkative, ["im", "der garten im haus"])
    assert "".join(short.split()) == letters * (2 * 8 + 8)
    assert "".join(long.split()) == letters * (2 * 16 + 8)


def test_one_sentence_is_translated_up_to_its_end(translator):
    ids, answer = translated_ids(translator, "ein hund")
    assert ids == ids_of(translator, "ein hund")
    assert answer == answer_alone(translator, ids)
    for sentence in ("", " "):
        with pytest.raises(ValueError, match=r"sentence must have text; got none"):
            translated_ids(translator, sentence)


# --- BLEU and chrF ---

SAID = ["The dog barks.", "a cat sleeps on the old sofa", "", "Zwei Kinder spielen im Garten ."]
RIGHT = ["The dog is barking.", "A cat sleeps on the sofa", "Nothing.", "Two children are playing."]


def test_the_scores_of_a_whole_text_are_sacrebleus():
    found, version = score_translations(SAID, RIGHT), re.escape(sacrebleu.__version__)
    assert found.bleu == sacrebleu.corpus_bleu(SAID, [RIGHT]).score
    assert found.chrf == sacrebleu.corpus_chrf(SAID, [RIGHT]).score
    assert re.fullmatch(
        rf"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:{version}",
        found.bleu_signature,
    )
    # Five of six words, in one sentence: n-grams that are right, 5/6, 4/5, 3/4 and 2/3.
    by_hand = score_translations(["a b c d e f"], ["a b c d e g"])
    assert by_hand.bleu == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert max(score_translations(RIGHT[::-1], RIGHT)[:2]) < 30


def test_texts_that_cannot_be_scored(monkeypatch):
    for said, right in ((SAID, RIGHT[:3]), ([], [])):
        message = f"references must be one for each of the {len(said)} translations"
        with pytest.raises(ValueError, match=message):
            score_translations(said, right)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    for asked in (require_sacrebleu, lambda: score_translations(SAID, RIGHT)):
        with pytest.raises(ValueError, match="BLEU needs the package sacrebleu"):
            asked()
