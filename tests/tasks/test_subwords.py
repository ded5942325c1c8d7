"""Subwords against sentencepiece's own processor and plain text."""

import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.tasks.translation.text import UNKNOWN, Subwords
from attention_jax.tasks.vocabulary import EOS, PAD, SOS

TEXT = (Path(__file__).parents[1] / "parallel_text/train.de").read_text("utf-8").splitlines()
SIZE = 389


@pytest.fixture(scope="module")
def subwords():
    return Subwords.learned(TEXT, SIZE)


# What sentencepiece leaves as it is: Unicode's form NFKC, words apart by one space, and neither the
# sign that it writes for a space nor the one of a letter that could not be read.
LETTERS = st.characters(exclude_categories=["C", "Z"], exclude_characters="\u2581\ufffd")
SENTENCES = (
    st.lists(st.text(LETTERS, min_size=1, max_size=7), max_size=5)
    .map(" ".join)
    .filter(lambda text: unicodedata.is_normalized("NFKC", text))
)


def round_trip(subwords: Subwords, *sentences: str) -> list[str]:
    return subwords.decode(subwords.encode(sentences))


def test_ids_are_those_of_a_vocabulary(subwords):
    assert subwords.size == SIZE
    assert subwords.labels([0, 1, 2]) == ["PAD", "SOS", "EOS"]
    assert (PAD, SOS, EOS) == (0, 1, 2)
    peer = sentencepiece.SentencePieceProcessor(model_proto=subwords.model)
    specials = (peer.pad_id(), peer.bos_id(), peer.eos_id(), peer.unk_id())
    assert specials == (0, 1, 2, UNKNOWN)
    assert sum(map(peer.IsByte, range(SIZE))) == 256
    assert subwords.encode(TEXT[:7]) == [peer.EncodeAsIds(line) for line in TEXT[:7]]


def test_the_text_it_learned_from(subwords):
    assert round_trip(subwords, *TEXT) == TEXT
    letters = sum(len(line.encode()) for line in TEXT)
    assert sum(map(len, subwords.encode(TEXT))) < letters / 1.9  # pieces, not bytes


@pytest.mark.parametrize(
    "sentence",
    [
        "",
        "🐕 schläft im 🌳garten 👩‍👩‍👧",
        "Съешь же ещё этих мягких французских булок",
        "犬は庭で眠る 한국어 हिन्दी العربية",
        "x ≤ y · ∑ \U0001f9ff\U00020bb7",
        "PAD SOS EOS <s> </s> <unk> <pad> <0x41>",
        "a" * 997,
    ],
)
def test_any_script_comes_back(subwords, sentence):
    assert round_trip(subwords, sentence, "Der Hund.") == [sentence, "Der Hund."]


@settings(deadline=None, max_examples=50)
@given(SENTENCES)
def test_round_trip(subwords, sentence):
    (ids,) = subwords.encode([sentence])
    assert subwords.decode([ids]) == [sentence]
    assert not {PAD, SOS, EOS, UNKNOWN} & {*ids}
    assert all(0 <= token < SIZE for token in ids)


@pytest.mark.parametrize("between", ["   ", "\u3000", "\t", "\u2581", "\ufffd", "\x01 "])
def test_space_is_one_space(subwords, between):
    assert round_trip(subwords, f" Der{between}Hund  ") == ["Der Hund"]


@pytest.mark.parametrize(
    ("sentence", "same"), [("Ｄｅｒ", "Der"), ("ﬁn", "fin"), ("a\u0308", "ä"), ("…", "...")]
)
def test_forms_of_a_letter_are_made_one(subwords, sentence, same):
    assert round_trip(subwords, sentence) == [same]
    assert subwords.encode([sentence]) == subwords.encode([same])


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=11))
def test_every_text_has_ids(subwords, sentence):
    (ids,) = subwords.encode([sentence])
    assert all(UNKNOWN < token < SIZE for token in ids)
    # At most what NFKC makes of it, which knows no control characters to leave out.
    (said,) = subwords.decode([ids])
    assert len(said) <= len(unicodedata.normalize("NFKD", sentence))


def test_decoding_ends_at_eos(subwords):
    (ids,) = subwords.encode(["Der Hund schläft."])
    rows = [
        ids,
        [SOS, *ids, EOS, PAD],
        [PAD, *ids, PAD, EOS, *ids],
        [EOS, *ids],
        [],
    ]
    said = ["Der Hund schläft."] * 3
    assert subwords.decode(rows) == [*said, "", ""]
    assert subwords.decode(np.array([[SOS, *ids, EOS, EOS]], np.int32)) == said[:1]
    assert subwords.decode([]) == []


def test_labels_are_the_pieces(subwords):
    (ids,) = subwords.encode(["Der Hund schläft"])
    labels = subwords.labels(np.array(ids, np.int32))
    assert "".join(labels) == "▁Der▁Hund▁schläft"
    assert subwords.labels(subwords.encode(["犬"])[0])[-3:] == ["<0xE7>", "<0x8A>", "<0xAC>"]
    assert subwords.labels([]) == []


def test_pieces_by_hand():
    """Of ▁ab ▁ab ▁ab ▁ac, ▁ and a stand together 4 times, then ▁a and b 3 times, ▁a and c once."""
    found = Subwords.learned(["ab ab ab ac"], 256 + 4 + 3 + 4)
    assert found.labels(range(260, 263)) == ["▁a", "▁ab", "▁ac"]
    assert sorted(found.labels(range(263, 267))) == ["a", "b", "c", "▁"]
    assert found.encode(["ac ab b"]) == [[262, 261, *found.encode(["b"])[0]]]


def test_the_same_text_gives_the_same_model(subwords):
    assert Subwords.learned(iter(TEXT), SIZE).model == subwords.model
    assert Subwords.learned(TEXT[:-41], SIZE).model != subwords.model
    assert Subwords.learned(TEXT, SIZE - 1).model != subwords.model


def test_a_model_is_its_bytes(subwords):
    again = Subwords(subwords.model)
    assert again.model == subwords.model
    assert again.size == SIZE
    assert again.encode(TEXT) == subwords.encode(TEXT)


def said_number(text: list[str], size: int, pattern: str) -> int:
    with pytest.raises(ValueError, match=f"^{pattern}; got {size}$") as error:
        Subwords.learned(text, size)
    found = re.search(r"(?:least|most) (\d+)", str(error.value))
    assert found
    return int(found[1])


MOST = r"vocabulary_size must be at most \d+, the number of subwords in this text"
LEAST = r"vocabulary_size must be at least \d+, for the letters of this text and 256 bytes"


@pytest.mark.parametrize("text", [TEXT, TEXT[:11], ["ab"], ["犬は 庭で", "眠る 犬"]])
@pytest.mark.parametrize("size", [9973, 100_003])
def test_the_largest_size_is_said_and_is_one(text, size):
    most = said_number(text, size, MOST)
    assert Subwords.learned(text, most).size == most
    assert said_number(text, most + 1, MOST) == most


@pytest.mark.parametrize("text", [TEXT, TEXT[:11], ["ab"], ["犬は 庭で", "眠る 犬"]])
@pytest.mark.parametrize("size", [5, 257, 260])
def test_the_smallest_size_is_said_and_is_one(text, size):
    least = said_number(text, size, LEAST)
    assert Subwords.learned(text, least).size == least
    assert said_number(text, least - 1, LEAST) == least


@pytest.mark.parametrize("text", [[], [""], ["", "  "]])
def test_no_text(text):
    with pytest.raises(ValueError, match=r"^.*331.*$") as error:
        Subwords.learned(text, 331)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "model",
    [
        lambda whole: b"",
        lambda whole: b"no model",
        lambda whole: whole[:-1],
        lambda whole: whole[:997],
        lambda whole: whole[1:],
        lambda whole: whole + b"and more",
    ],
    ids=["empty", "text", "cut", "truncated", "shifted", "longer"],
)
def test_damaged_models(subwords, model):
    with pytest.raises(ValueError, match=r"^model must be a sentencepiece model; .*$") as error:
        Subwords(model(subwords.model))
    assert "\n" not in str(error.value)


def trained(folder: Path, **options) -> bytes:
    """A model as sentencepiece's own user makes one."""
    options = {"vocab_size": 331, "model_type": "bpe", "byte_fallback": True, **options}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT), model_prefix=str(folder / "own"), minloglevel=2, **options
    )
    return (folder / "own.model").read_bytes()


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, (-1, 1, 2)),
        ({"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}, (0, 2, 3)),
        ({"pad_id": 0, "unk_id": 3, "bos_id": 1, "eos_id": -1}, (0, 1, -1)),
    ],
)
def test_models_with_other_ids(tmp_path, options, ids):
    message = re.escape(f"model must have the ids (0, 1, 2) for PAD, SOS and EOS; got {ids}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        Subwords(trained(tmp_path, **options))


def test_a_model_of_ones_own_with_the_same_ids(tmp_path):
    own = Subwords(trained(tmp_path, pad_id=0, bos_id=1, eos_id=2, unk_id=3))
    assert own.decode(own.encode(TEXT[:7])) == TEXT[:7]


def test_without_sentencepiece(subwords, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    message = re.escape(
        "translation needs the package sentencepiece: .venv/bin/pip install -e '.[translate]'"
    )
    for needs in (lambda: Subwords(subwords.model), lambda: Subwords.learned(TEXT, SIZE)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            needs()
