"""Reading two files of sentences, against lines and bytes written out by hand."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.tasks.translation.text import (
    ParallelText,
    check_same_length,
    decode_sentences,
    read_parallel_text,
    read_sentences,
)

SHIPPED = Path(__file__).parents[1] / "parallel_text"
BOM = b"\xef\xbb\xbf"


def written(folder: Path, content: bytes, name: str = "some.de") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path, reason: str) -> str:
    """A pattern of the whole message, which is one line."""
    return f"^{re.escape(str(path))} {reason}$"


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("begin", [b"", BOM])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["some.de", "some.txt.gz"])
def test_lines_of_every_kind_of_file(tmp_path, name, newline, begin, end):
    lines = ["Ein Hund.", "Größe über alles", "", "犬 🐕"]
    content = begin + newline.join(line.encode() for line in lines) + end.replace(b"\n", newline)
    if name.endswith(".gz"):
        content = gzip.compress(content)
    assert read_sentences(written(tmp_path, content, name)) == lines


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\n\n", ["a", ""]),  # the last newline ends a line, the one before it is an empty line
        (b"\n\na", ["", "", "a"]),
        (b"a\n  \t \nb", ["a", "", "b"]),
        (b"  a b \t\n\xe3\x80\x80c\xc2\xa0\n", ["a b", "c"]),
        (b"a\n" + BOM + b"b", ["a", "\ufeffb"]),  # a mark of order only where a file begins
    ],
)
def test_empty_lines_keep_their_place_and_space_around_goes(tmp_path, content, lines):
    assert read_sentences(written(tmp_path, content)) == lines


@pytest.mark.parametrize("letter", "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r")
def test_only_a_newline_ends_a_line(tmp_path, letter):
    """`str.splitlines` ends one at each of these, and the two files would be out of step."""
    line = f"ein{letter}Hund"
    assert len(line.splitlines()) == 2
    content = f"{line}\nzwei".encode()
    assert read_sentences(written(tmp_path, content)) == [line, "zwei"]


def test_members_of_a_gz_are_one_text(tmp_path):
    content = gzip.compress(b"ein\nzw") + gzip.compress(b"ei\ndrei\n")
    assert read_sentences(written(tmp_path, content, "two.gz")) == ["ein", "zwei", "drei"]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"])), min_size=1))
def test_any_lines_come_back(lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    expected = [lines[0].removeprefix("\ufeff"), *lines[1:]]
    assert decode_sentences(content, "any") == expected


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.de"
    with pytest.raises(ValueError, match=refusal(missing, "cannot be read: No such file.*")):
        read_sentences(missing)
    with pytest.raises(ValueError, match=refusal(tmp_path, "cannot be read: Is a directory")):
        read_sentences(tmp_path)


WHOLE = gzip.compress(b"".join(b"Satz %d\n" % number for number in range(997)))


@pytest.mark.parametrize(
    "content",
    [
        WHOLE[:-11],
        WHOLE[:5],
        b"Ein Hund.\n",
        WHOLE[:-8] + b"\0" * 8,  # with the sum and length of something else
        WHOLE[:41] + b"\xff" * 41 + WHOLE[82:],
        WHOLE + b"and no gz",
    ],
    ids=["truncated", "header", "plain", "sum", "middle", "rest"],
)
def test_damaged_gz(tmp_path, content):
    path = written(tmp_path, content, "damaged.gz")
    with pytest.raises(ValueError, match=refusal(path, "cannot be read: .*")):
        read_sentences(path)


@pytest.mark.parametrize("content", [b"", BOM, b"\n", b"\n \r\n\t\n"])
@pytest.mark.parametrize("name", ["empty.de", "empty.gz"])
def test_files_without_text(tmp_path, name, content):
    path = written(tmp_path, gzip.compress(content) if name.endswith(".gz") else content, name)
    with pytest.raises(ValueError, match=refusal(path, "is empty; it must have one sentence.*")):
        read_sentences(path)


def test_a_gz_of_no_bytes_is_refused(tmp_path):
    path = written(tmp_path, b"", "nothing.gz")
    with pytest.raises(ValueError, match=refusal(path, ".*")):
        read_sentences(path)


@pytest.mark.parametrize("begin", [b"", BOM])
@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (b"\xff", 1, "ff"),
        (b"a\nb\xe4c\nd\xfc", 2, "e4"),  # Latin-1; the first is named
        (b"\xc3\xa4\n\n\xf0\x9f", 3, "f0"),  # a letter that is cut off
        (b"a\n\xed\xa0\x80\n", 2, "ed"),  # half a surrogate pair
        (b"a\nbcd\nf\x80", 3, "80"),
    ],
)
def test_bad_utf8_is_named_with_its_line(tmp_path, begin, content, line, byte):
    path = written(tmp_path, begin + content)
    reason = f"must be UTF-8; line {line} has the invalid byte 0x{byte}"
    with pytest.raises(ValueError, match=refusal(path, reason)):
        read_sentences(path)


@settings(deadline=None)
@given(st.lists(st.text("ab é\n"), min_size=1), st.sampled_from([b"", BOM]), st.data())
def test_line_of_a_bad_byte(lines, begin, data):
    texts = "\n".join(lines).split("\n")
    bad = data.draw(st.integers(0, len(texts) - 1))
    content = begin + b"\n".join(
        line.encode() + (b"\xff" if number == bad else b"") for number, line in enumerate(texts)
    )
    with pytest.raises(
        ValueError, match=f"^any must be UTF-8; line {bad + 1} has the invalid byte 0xff"
    ):
        decode_sentences(content, "any")


def test_two_files(tmp_path):
    source = written(tmp_path, b"eins\n\ndrei\n", "some.de")
    target = written(tmp_path, gzip.compress(b"one\r\ntwo\r\n"), "some.en.gz")
    counts = "must have the same number of lines, translations line by line; got 3 and 2"
    message = f"^{re.escape(f'{source} and {target}')} {counts}$"
    with pytest.raises(ValueError, match=message):
        read_parallel_text(source, target)
    written(tmp_path, gzip.compress(b"one\r\ntwo\r\nthree"), "some.en.gz")
    text = read_parallel_text(source, target)
    assert text == (["eins", "", "drei"], ["one", "two", "three"])
    assert (text.source[2], text.target[2]) == ("drei", "three")


def test_both_files_are_looked_at(tmp_path):
    good, bad = written(tmp_path, b"eins"), written(tmp_path, b"\xff", "bad.en")
    for paths in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match=refusal(bad, "must be UTF-8; .*")):
            read_parallel_text(*paths)


def test_same_length():
    check_same_length("a", ["x", "y"], "b", ["z", ""])
    with pytest.raises(ValueError, match=r"^a and b must have .*; got 0 and 2$"):
        check_same_length("a", [], "b", ["z", ""])


def test_digest_is_sha256_of_lines_and_an_end_of_each_side():
    text = ParallelText(["ein Hund", "Größe"], ["a dog", "size"])
    content = "ein Hund\nGröße\n\0a dog\nsize\n\0".encode()
    assert text.digest == hashlib.sha256(content).hexdigest()
    assert text.digest == ParallelText(*map(list, text)).digest


def test_every_change_changes_the_digest():
    texts = [
        (["a", "b"], ["c", "d"]),
        (["c", "d"], ["a", "b"]),
        (["b", "a"], ["d", "c"]),
        (["a", "b", "c"], ["d"]),  # a newline has moved from one side to the other
        (["a"], ["b", "c", "d"]),
        (["a", "bc"], ["", "d"]),
        (["ab", ""], ["c", "d"]),
        (["a", "b", ""], ["c", "d"]),
        (["a", "b"], ["c", "d", ""]),
        (["a", "b"], ["c", "d "]),
        (["a b"], ["c d"]),
    ]
    assert len({ParallelText(*text).digest for text in texts}) == len(texts)


def test_the_digest_is_of_the_text_not_of_the_files(tmp_path):
    plain = read_parallel_text(written(tmp_path, b"a\nb\n"), written(tmp_path, b"c\nd", "x.en"))
    content = gzip.compress(BOM + b"a\r\nb\r\n")
    other = read_parallel_text(written(tmp_path, content, "a.gz"), tmp_path / "x.en")
    assert plain.digest == other.digest


def shipped_words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("language", ["de", "en"])
def test_the_text_that_ships(language):
    texts = [(SHIPPED / f"{name}.{language}").read_bytes() for name in ("train", "validation")]
    for content in texts:
        assert b"\r" not in content
        assert content.endswith(b"\n")
    train, validation = (content.decode().splitlines() for content in texts)
    assert (len(train), len(validation)) == (300, 24)
    assert len({*train, *validation}) == 324
    assert shipped_words(" ".join(validation)) <= shipped_words(" ".join(train))
    assert {len(line.split()) for line in train} >= set(range(3, 14))
    read = read_parallel_text(SHIPPED / "train.de", SHIPPED / "train.en")
    assert read[["de", "en"].index(language)] == train
