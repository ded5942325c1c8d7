"""Translating, a batch at a time, against the model asked for one subword after another."""

import dataclasses
import functools
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sacrebleu

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
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, padded_rows

SIZE = 300
WORDS = ["der hund bellt", "die katze schläft im haus", "ein kind spielt", "im garten"] * 4
# Of up to 8 subwords or of up to 16, EOS counted, and of none.
SENTENCES = ["ein hund", "", "der garten im haus", "im", "katze", "das kind bellt", "kind", ""]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Five rows of width 8, two of width 16."""
    monkeypatch.setattr(translating, "_BATCH_TOKENS", 40)


def made(**settings):
    """A model that nobody trained, far enough from nothing to say different things."""
    task = Translation(
        source=Path("a.de"),
        target=Path("a.en"),
        vocabulary_size=SIZE,
        model=ModelConfig(
            num_heads=2,
            dim=8,
            hidden_dim=13,
            dropout_rate=0.5,
            encoder_layers=0,
            tied_embeddings="all",
        ),
        **settings,
    )
    params = jax.jit(task.init)(jax.random.key(6))
    params = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params)
    return Translator(task, params, Subwords.learned(WORDS, SIZE))


def said_always(translator, token):
    """The same model, but all it ever says is one id."""
    params = jax.tree.map(lambda leaf: leaf, translator.params)
    params["output_norm"] = {
        "scale": np.zeros_like(params["output_norm"]["scale"]),
        "bias": np.ones_like(params["output_norm"]["bias"]),
    }
    table = params["source_embedding"]["embedding"].copy()
    table[token] = 10 * np.abs(table).max()
    params["source_embedding"] = {"embedding": table}
    return translator._replace(params=params)


@functools.lru_cache
def forward(task):
    return jax.jit(lambda params, *given: task.bind(params)(*given, return_weights=True))


def one_after_another(translator, ids, most):
    """What the model says by its own forward pass, always fed all it has said: (ids, weights)."""
    source = np.array([[*ids, *[PAD] * (19 - len(ids))]], np.int32)  # other padding than theirs
    lengths, said = np.array([len(ids)], np.int32), []
    while len(said) < most and EOS not in said:
        inputs = [SOS, *said, *[PAD] * (39 - len(said))]  # no position looks to its right
        given = translator.params, source, lengths, np.array([inputs], np.int32)
        logits, weights = forward(translator.task)(*given)
        said.append(int(np.argmax(np.asarray(logits[0, len(said)], np.float64))))
    return said, weights[:, 0, : len(said), : len(ids)]


@pytest.fixture(scope="module")
def translator():
    return made()


def ids_of(translator, sentence):
    return [*translator.subwords.encode([sentence])[0], EOS]


# --- sentences ---


def test_each_translation_is_the_models_own_and_in_its_place(translator):
    sentences, told = [*SENTENCES, *SENTENCES[::-1], SENTENCES[0]], []
    found = translate(translator, sentences, progress=told.append)
    assert sum(told) == len(sentences)
    assert max(told) == 5
    assert len(told) > 4
    alone = {"": ""}
    for sentence in filter(None, SENTENCES):
        ids = ids_of(translator, sentence)
        said, _ = one_after_another(translator, ids, longest_answer(-(-len(ids) // 8) * 8))
        (alone[sentence],) = translator.subwords.decode([said])
    assert found == [alone[sentence] for sentence in sentences]
    assert len(set(found)) == 7  # they differ: one in another's place would be seen
    for sentence in SENTENCES:
        assert translate(translator, [sentence]) == [alone[sentence]]


def test_without_text_nothing_is_said(translator):
    assert translate(translator, ["", " ", "", "im"])[:3] == ["", "", ""]
    assert translate(translator, []) == []


@pytest.mark.parametrize("penalty", [pytest.param(0.0, marks=pytest.mark.slow), 2.5])
def test_beams_are_those_of_the_model_alone(translator, penalty):
    sentences = ["ein hund", "katze", "im"]
    rows = [ids_of(translator, sentence) for sentence in sentences]
    assert max(map(len, rows)) <= 8
    found = translate(translator, sentences, Search(beams=2, length_penalty=penalty))
    search = functools.partial(
        translator.task.bind(translator.params).beam_decode, beams=2, length_penalty=penalty,
        sos=SOS, eos=EOS, pad=PAD, max_length=longest_answer(8),
    )  # fmt: skip
    alone = jax.jit(search)(*padded_rows(rows, 3, 11))
    assert found == translator.subwords.decode(np.asarray(alone.tokens[:, 0]))
    assert found != translate(translator, sentences)


@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_longest_answer(translator, beams):
    word = ids_of(translator, "im")[0]
    talkative = said_always(translator, word)
    said = translator.subwords.decode([[word]])[0]
    assert len(ids_of(translator, "im")) < 8 < len(ids_of(translator, "der garten im haus")) < 16
    short, long = translate(talkative, ["im", "der garten im haus"], Search(beams=beams))
    assert "".join(short.split()) == said * (2 * 8 + 8)
    assert "".join(long.split()) == said * (2 * 16 + 8)


@pytest.mark.slow
def test_any_text_is_translated_in_bfloat16_too(translator):
    task = dataclasses.replace(translator.task, precision="bfloat16")
    params = jax.tree.map(lambda leaf: leaf / 2, translator.params)  # as they are initialised
    untrained = translator._replace(task=task, params=params)
    with jax.numpy_dtype_promotion("standard"):  # flax wants it for bfloat16
        found = translate(untrained, ["ein hund", "日 £", "xyx", ""], Search(beams=3))
    assert found[3] == ""
    assert all("\n" not in answer for answer in found)


def test_one_sentence_is_translated_up_to_its_end(translator):
    ids, answer = translated_ids(translator, "ein hund")
    assert ids == ids_of(translator, "ein hund")
    said, _ = one_after_another(translator, ids, longest_answer(8))
    assert answer == said
    for sentence in ("", " "):
        with pytest.raises(ValueError, match=r"sentence must have text; got none"):
            translated_ids(translator, sentence)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 0}, r"beams must be at least 1; got 0"),
        ({"beams": 2.0}, r"beams must be an integer; got 2.0"),
        ({"length_penalty": -0.5}, r"length_penalty must be at least 0; got -0.5"),
        ({"length_penalty": float("nan")}, r"length_penalty must be at least 0; got nan"),
        ({"length_penalty": float("inf")}, r"length_penalty must be at least 0; got inf"),
    ],
)
def test_bad_searches(settings, message):
    with pytest.raises(ValueError, match=message):
        Search(**settings)


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
