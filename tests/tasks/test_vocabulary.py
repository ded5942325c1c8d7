"""Letters to ids and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Vocabulary


@settings(max_examples=20)
@given(st.text("aAzß犬 🐕\n", min_size=1, max_size=11), st.data())
def test_ids_are_the_specials_then_the_letters_in_order(letters, data):
    alphabet = "".join(dict.fromkeys(letters))
    vocabulary, text = Vocabulary(alphabet), data.draw(st.text(alphabet))
    ids = vocabulary.encode(text)
    assert ids == [3 + alphabet.index(letter) for letter in text]
    assert vocabulary.size == 3 + len(alphabet)
    assert vocabulary.decode(ids) == text
    assert vocabulary.decode([PAD, SOS, *ids, PAD, EOS, 3]) == text
    labels = [vocabulary.label(token) for token in range(vocabulary.size)]
    assert labels == ["PAD", "SOS", "EOS", *alphabet]


def test_foreign_letters_and_bad_alphabets():
    with pytest.raises(ValueError, match=r"text must consist of letters .*; got 'ï' in 'naïve'"):
        Vocabulary().encode("naïve")
    for alphabet in ("", "aba"):
        with pytest.raises(ValueError, match=f"alphabet must be distinct .*; got '{alphabet}'"):
            Vocabulary(alphabet)
