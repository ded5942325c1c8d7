"""Parallel text: two files, one sentence a line, line by line translations of each other."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class ParallelText(NamedTuple):
    """Sentences and their translations, in order."""

    source: list[str]
    target: list[str]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it: another text has another."""
        found = hashlib.sha256()
        for side in self:
            found.update("\n".join([*side, ""]).encode())
            found.update(b"\0")
        return found.hexdigest()


def read_parallel_text(source: Path, target: Path) -> ParallelText:
    """Two files with as many lines, see `read_sentences`.

    Raises:
        ValueError: a file cannot be read, is empty or no UTF-8, or they differ in length.
    """
    text = ParallelText(read_sentences(source), read_sentences(target))
    check_same_length(source, text.source, target, text.target)
    return text


def check_same_length(
    source: Path | str, sources: Sequence[str], target: Path | str, targets: Sequence[str]
) -> None:
    """Raises ValueError unless there are as many lines."""
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} and {target} must have as many lines, line by line translations;"
            f" got {len(sources)} and {len(targets)}"
        )


def read_sentences(path: Path) -> list[str]:
    """The lines of a file of UTF-8, plain or .gz; those without text stand as "".

    Raises:
        ValueError: it cannot be read, is empty, or is no UTF-8.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    sentences = decode_sentences(content, str(path))
    if not any(sentences):
        raise ValueError(f"{path} is empty; it must have one sentence a line")
    return sentences


def decode_sentences(content: bytes, name: str) -> list[str]:
    """Lines of UTF-8, without space around them.

    Raises:
        ValueError: they are none.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} must be UTF-8; line {line} has the byte 0x{content[error.start]:02x}, which is"
            " none"
        ) from error
    # Not splitlines, to which some letters end a line: it would put the two files out of step.
    lines = text.split("\n")
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]
