"""Letters to ids and back."""

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Vocabulary

LETTERS = Vocabulary().alphabet


def test_ids_are_the_specials_then_the_letters_in_order():
    assert (PAD, SOS, EOS) == (0, 1, 2)
    assert Vocabulary().size == 29
    assert Vocabulary().encode("az") == [3, 28]
    assert Vocabulary("zyx").encode("xyz") == [5, 4, 3]
    assert Vocabulary("zyx").size == 6


@given(st.text(LETTERS))
def test_round_trip(text):
    ids = Vocabulary().encode(text)
    assert len(ids) == len(text)
    assert Vocabulary().decode(ids) == text


@given(st.text(LETTERS), st.lists(st.integers(0, 28)))
def test_decoding_ends_at_eos(text, rest):
    ids = Vocabulary().encode(text)
    assert Vocabulary().decode([SOS, *ids, EOS, *rest]) == text
    assert Vocabulary().decode([PAD, *ids, PAD, EOS, *rest]) == text


@given(st.text(min_size=1, max_size=11), st.data())
def test_any_alphabet(letters, data):
    alphabet = "".join(dict.fromkeys(letters))
    vocabulary = Vocabulary(alphabet)
    text = data.draw(st.text(alphabet))
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_decodes_arrays():
    assert Vocabulary().decode(jnp.array([3, 28, 2, 5])) == "az"


@pytest.mark.parametrize("text", ["Abc", "ab c", "naïve", "a\n"])
def test_foreign_letters_are_named(text):
    foreign = next(letter for letter in text if letter not in LETTERS)
    with pytest.raises(ValueError, match="text must consist of letters") as error:
        Vocabulary().encode(text)
    assert repr(foreign) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_bad_alphabets(alphabet):
    with pytest.raises(ValueError, match=f"alphabet must be distinct letters; got '{alphabet}'"):
        Vocabulary(alphabet)


def test_labels_are_letters_and_all_different():
    vocabulary = Vocabulary("abc")
    labels = [vocabulary.label(token) for token in range(vocabulary.size)]
    assert labels[3:] == ["a", "b", "c"]
    assert len(set(labels)) == 6
