"""Parallel text and its subwords, against lines, bytes and sentencepiece's own processor."""

import gzip
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.tasks.translation.text import (
    UNKNOWN,
    Subwords,
    check_same_length,
    lines_of,
    read_parallel_text,
    read_sentences,
)
from attention_jax.tasks.vocabulary import EOS, PAD, SOS

SHIPPED = Path(__file__).parents[1] / "parallel_text"
BOM = b"\xef\xbb\xbf"


def written(folder: Path, content: bytes, name: str = "some.de") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# --- files ---


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("begin", [b"", BOM])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["some.de", "some.txt.gz"])
def test_lines_of_every_kind_of_file(tmp_path, name, newline, begin, end):
    lines = ["Ein Hund.", "Größe über alles", "", "犬 🐕"]
    content = begin + newline.join(line.encode() for line in lines) + end.replace(b"\n", newline)
    if name.endswith(".gz"):
        content = gzip.compress(content[:17]) + gzip.compress(content[17:])
    assert read_sentences(written(tmp_path, content, name)) == lines


@settings(deadline=None)
@given(st.lists(st.text("aß犬 \t\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\u3000")))
def test_only_a_newline_ends_a_line_and_space_around_goes(lines):
    """`str.splitlines` ends a line at other characters too; the files would be out of step."""
    text = "".join(f"{line}\n" for line in ["x", *lines])
    assert lines_of(text) == ["x", *(line.strip() for line in lines)]


WHOLE = gzip.compress(b"".join(b"Satz %d\n" % number for number in range(997)))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.de", None, "cannot be read: No such file"),
        ("truncated.gz", WHOLE[:-11], "cannot be read: "),
        ("plain.gz", b"Ein Hund.\n", "cannot be read: "),
        ("sum.gz", WHOLE[:-8] + b"\0" * 8, "cannot be read: "),
        ("middle.gz", WHOLE[:41] + b"\xff" * 41 + WHOLE[82:], "cannot be read: "),
        ("empty.de", b"", "is empty"),
        ("blank.de", b" \n\n", "is empty"),
        ("latin.de", "ja\nGröße".encode("latin-1"), "must be UTF-8; line 2 .* byte 0xf6"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, reason):
    good, bad = written(tmp_path, b"eins"), tmp_path / name
    if content is not None:
        written(tmp_path, content, name)
    for paths in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match=f"^{re.escape(str(bad))} {reason}") as error:
            read_parallel_text(*paths)
        assert "\n" not in str(error.value)


def test_both_sides_have_as_many_lines():
    check_same_length("a", ["x", "y"], "b", ["z", ""])
    with pytest.raises(ValueError, match=r"^a and b must have .*; got 0 and 2$"):
        check_same_length("a", [], "b", ["z", ""])


# --- subwords ---

TEXT = (SHIPPED / "train.de").read_text("utf-8").splitlines()
SIZE = 389


@pytest.fixture(scope="module")
def subwords():
    return Subwords.learned(TEXT, SIZE)


def test_ids_are_sentencepieces_and_those_of_a_vocabulary(subwords):
    assert [subwords.label(token) for token in (0, 1, 2)] == ["PAD", "SOS", "EOS"]
    peer = sentencepiece.SentencePieceProcessor(model_proto=subwords.model)
    specials = (peer.pad_id(), peer.bos_id(), peer.eos_id(), peer.unk_id())
    assert specials == (PAD, SOS, EOS, UNKNOWN) == (0, 1, 2, 3)
    assert sum(map(peer.IsByte, range(SIZE))) == 256
    assert peer.GetPieceSize() == SIZE
    assert subwords.encode(TEXT[:7]) == [peer.EncodeAsIds(line) for line in TEXT[:7]]
    lines = [*TEXT, "aZ9 éß жΩ १ 犬 🐕", ""]  # in Unicode's form NFKC: other text is changed
    assert subwords.decode(subwords.encode(lines)) == lines
    (ids,) = subwords.encode(["Der Hund schläft"])
    assert "".join(map(subwords.label, np.array(ids, np.int32))) == "▁Der▁Hund▁schläft"


def test_decoding_ends_at_eos(subwords):
    (ids,) = subwords.encode(["Der Hund schläft."])
    rows = [ids, [SOS, *ids, EOS, PAD], [PAD, *ids, PAD, EOS, *ids], [EOS, *ids], []]
    assert subwords.decode(rows) == [*["Der Hund schläft."] * 3, "", ""]
    assert subwords.decode(np.array([[SOS, *ids, EOS, EOS]], np.int32)) == ["Der Hund schläft."]
    assert subwords.decode([]) == []


@pytest.mark.parametrize(
    ("text", "size", "reason"),
    [(TEXT, 9973, "Please set it to a value <= "), (TEXT, 257, "smaller"), ([""], 331, "")],
)
def test_a_size_that_does_not_suit_the_text_is_one_line(text, size, reason):
    message = f"^vocabulary_size must suit the text; .*{reason}.*; got {size}$"
    with pytest.raises(ValueError, match=message):
        Subwords.learned(text, size)


def test_without_sentencepiece(subwords, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for needs in (lambda: Subwords(subwords.model), lambda: Subwords.learned(TEXT, SIZE)):
        with pytest.raises(ValueError, match="translation needs the package sentencepiece"):
            needs()
