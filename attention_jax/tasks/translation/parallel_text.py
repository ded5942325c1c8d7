"""Parallel text: two files with one sentence per line, translations of each other."""

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
        """SHA-256 of both sides."""
        sha256 = hashlib.sha256()
        for side in self:
            sha256.update("\n".join([*side, ""]).encode())
            sha256.update(b"\0")
        return sha256.hexdigest()


def read_parallel_text(source: Path, target: Path) -> ParallelText:
    """Reads two files with the same number of lines; see `read_sentences`.

    Raises:
        ValueError: a file cannot be read, is empty or not UTF-8; or the numbers of lines differ.
    """
    text = ParallelText(read_sentences(source), read_sentences(target))
    check_same_length(source, text.source, target, text.target)
    return text


def check_same_length(
    source: Path | str, sources: Sequence[str], target: Path | str, targets: Sequence[str]
) -> None:
    """Raises ValueError unless the numbers of lines are equal."""
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} and {target} must have the same number of lines, translations line by line;"
            f" got {len(sources)} and {len(targets)}"
        )


def read_sentences(path: Path) -> list[str]:
    """The lines of a UTF-8 file, plain or .gz; a line without text becomes "".

    Raises:
        ValueError: the file cannot be read, is empty, or is not UTF-8.
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
        raise ValueError(f"{path} is empty; it must have one sentence per line")
    return sentences


def decode_sentences(content: bytes, name: str) -> list[str]:
    """Decodes lines of UTF-8, and strips the space around them.

    Raises:
        ValueError: the content is not UTF-8.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} must be UTF-8; line {line} has the invalid byte 0x{content[error.start]:02x}"
        ) from error
    # splitlines would also split at some Unicode characters, and the files would get out of step.
    lines = text.split("\n")
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]
