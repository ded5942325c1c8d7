"""Translating, a batch at a time, against the model asked for one subword after another."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from attention_jax.tasks.translation.subwords import Subwords

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.translation import translate as translating
from attention_jax.tasks.translation.batches import padded_sources
from attention_jax.tasks.translation.task import (
    TranslationConfig,
    Vocabularies,
    bind,
    translation_task,
)
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    align,
    longest_answer,
    translate,
    weights_of,
)
from attention_jax.tasks.vocabulary import EOS, PAD, SOS

SIZE = 300
WORDS = ["der hund bellt", "die katze schläft im haus", "ein kind spielt", "im garten"] * 4
ENGLISH = ["the dog barks", "the cat sleeps at home", "a child is playing", "in the garden"] * 4
# Of up to 8 subwords or of up to 16, EOS counted, and of none.
SENTENCES = ["ein hund", "", "der garten im haus", "im", "katze", "das kind bellt", "kind", ""]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Five rows of width 8, two of width 16."""
    monkeypatch.setattr(translating, "_BATCH_TOKENS", 40)


def made(*, separate=False, **settings):
    """A model that nobody trained, far enough from nothing to say different things."""
    config = TranslationConfig(
        source=Path("a.de"),
        target=Path("a.en"),
        vocabulary="separate" if separate else "joint",
        vocabulary_size=SIZE,
        model=ModelConfig(
            num_heads=2,
            dim=8,
            hidden_dim=13,
            dropout_rate=0.5,
            encoder_layers=0,
            tied_embeddings="none" if separate else "all",
        ),
        **settings,
    )
    source, target = Subwords.learned(WORDS, SIZE), Subwords.learned(ENGLISH, SIZE)
    vocabularies = Vocabularies(source, target if separate else source)
    params = jax.jit(translation_task(config).init)(jax.random.key(6))
    return Translator(config, jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params), vocabularies)


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
def forward(config):
    return jax.jit(lambda params, *given: bind(config, params)(*given, return_weights=True))


def one_after_another(translator, ids, most):
    """What the model says by its own forward pass, always fed all it has said: (ids, weights)."""
    source = np.array([[*ids, *[PAD] * (19 - len(ids))]], np.int32)  # other padding than theirs
    lengths, said = np.array([len(ids)], np.int32), []
    while len(said) < most and EOS not in said:
        inputs = [SOS, *said, *[PAD] * (39 - len(said))]  # no position looks to its right
        given = translator.params, source, lengths, np.array([inputs], np.int32)
        logits, weights = forward(translator.config)(*given)
        said.append(int(np.argmax(np.asarray(logits[0, len(said)], np.float64))))
    return said, weights[:, 0, : len(said), : len(ids)]


@pytest.fixture(scope="module")
def translator():
    return made()


def ids_of(translator, sentence):
    return [*translator.vocabularies.source.encode([sentence])[0], EOS]


# --- sentences ---


@pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_translation_is_the_models_own_and_in_its_place(translator, separate):
    translator = made(separate=True) if separate else translator
    sentences, told = [*SENTENCES, *SENTENCES[::-1], SENTENCES[0]], []
    found = translate(translator, sentences, progress=told.append)
    assert sum(told) == len(sentences)
    assert max(told) == 5
    assert len(told) > 4
    alone = {"": ""}
    for sentence in filter(None, SENTENCES):
        ids = ids_of(translator, sentence)
        said, _ = one_after_another(translator, ids, longest_answer(-(-len(ids) // 8) * 8))
        (alone[sentence],) = translator.vocabularies.target.decode([said])
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
        bind(translator.config, translator.params).beam_decode, beams=2, length_penalty=penalty,
        sos=SOS, eos=EOS, pad=PAD, max_length=longest_answer(8),
    )  # fmt: skip
    alone = jax.jit(search)(*padded_sources(rows, 3, 11))
    assert found == translator.vocabularies.target.decode(np.asarray(alone.tokens[:, 0]))
    assert found != translate(translator, sentences)


@pytest.mark.slow
def test_one_beam_is_greedy(translator):
    one_beam = functools.partial(
        bind(translator.config, translator.params).beam_decode, beams=1, length_penalty=3.0,
        sos=SOS, eos=EOS, pad=PAD, max_length=longest_answer(8),
    )  # fmt: skip
    sentences = ["ein hund", "katze", "im"]
    rows = [ids_of(translator, sentence) for sentence in sentences]
    alone = jax.jit(one_beam)(*padded_sources(rows, 3, 11))
    found = translate(translator, sentences, Search(beams=1, length_penalty=3.0))
    assert found == translator.vocabularies.target.decode(np.asarray(alone.tokens[:, 0]))
    assert found == translate(translator, sentences)


@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_longest_answer(translator, beams):
    word = ids_of(translator, "im")[0]
    talkative = said_always(translator, word)
    said = translator.vocabularies.target.decode([[word]])[0]
    assert len(ids_of(translator, "im")) < 8 < len(ids_of(translator, "der garten im haus")) < 16
    short, long = translate(talkative, ["im", "der garten im haus"], Search(beams=beams))
    assert "".join(short.split()) == said * (2 * 8 + 8)
    assert "".join(long.split()) == said * (2 * 16 + 8)


@pytest.mark.parametrize("token", [PAD, SOS, EOS])
def test_special_ids_are_no_text(translator, token):
    assert translate(said_always(translator, token), ["ein hund", "im"]) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("token", "label"), [(PAD, "PAD"), (SOS, "SOS"), (EOS, "EOS")])
def test_special_ids_are_shown_where_it_looked(translator, token, label):
    found = align(said_always(translator, token), "im")
    assert found.translation == ""
    assert set(found.target_labels) == {label}
    assert len(found.target_labels) == (1 if token == EOS else longest_answer(2))


@pytest.mark.parametrize(
    ("precision", "beams"),
    [
        ("float32", 1),
        pytest.param("float32", 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 3, marks=pytest.mark.slow),
    ],
)
def test_the_untrained_say_anything_without_an_error(translator, precision, beams):
    config = dataclasses.replace(translator.config, precision=precision)
    params = jax.tree.map(lambda leaf: leaf / 2, translator.params)  # as they are initialised
    untrained = translator._replace(config=config, params=params)
    sentences = ["ein hund", "日 £", "xyx", ""]  # unknown letters are spelled in bytes
    with jax.numpy_dtype_promotion("standard"):  # flax wants it for bfloat16
        found = translate(untrained, sentences, Search(beams=beams))
    assert list(map(type, found)) == [str] * 4
    assert found[3] == ""
    assert all("\n" not in answer for answer in found)


@pytest.mark.slow
def test_where_bfloat16_looked(translator):
    config = dataclasses.replace(translator.config, precision="bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        weights = align(translator._replace(config=config), "ein hund").weights
    np.testing.assert_allclose(np.asarray(weights, np.float64).sum(-1), 1, atol=0.02)


# --- where it looked ---


def test_align_is_the_models_own_account(translator):
    found = align(translator, "ein hund")
    ids, target = ids_of(translator, "ein hund"), translator.vocabularies.target
    said, weights = one_after_another(translator, ids, longest_answer(len(ids)))
    assert found.translation == target.decode([said])[0]
    assert found.source_labels[-1] == "EOS"
    assert "".join(found.source_labels[:-1]) == "▁ein▁hund"
    assert found.target_labels == target.labels(said)
    assert found.weights.shape == (1, len(said), len(ids))
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    assert found.weights.min() >= 0
    # Row t is how subword t was found, by a pass that had read no more than those before it.
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-6)
    assert found.weights.std(axis=1).max() > 0.01  # they differ from row to row
    np.testing.assert_array_equal(weights_of(translator, ids, said), found.weights)


@pytest.mark.slow
def test_align_translates_as_translate_does(translator):
    """Of as many subwords as a batch of width 8 has room for: both may say as much."""
    sentence, search = "ein hund im", Search(beams=3)
    assert len(ids_of(translator, sentence)) == 8
    (answer,) = translate(translator, [sentence], search)
    assert align(translator, sentence, search).translation == answer


@pytest.mark.parametrize("sentence", ["", " "])
def test_nothing_to_align(translator, sentence):
    with pytest.raises(ValueError, match=r"sentence must have text; got none"):
        align(translator, sentence)


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


def test_a_search_is_said_in_words_that_json_holds():
    assert dataclasses.asdict(Search(beams=4)) == {"beams": 4, "length_penalty": 1.0}
