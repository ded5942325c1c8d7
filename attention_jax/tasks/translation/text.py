"""Parallel text, and the subwords that it is cut into.

The text is two files with one sentence per line, translations of each other. Subwords are pieces of
words, learned from the text by sentencepiece; they can spell any text.
"""

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from attention_jax.core.checks import optional_package
from attention_jax.core.errors import one_line
from attention_jax.tasks.files import read_text
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, up_to_eos

UNKNOWN = 3  # never used: text outside the pieces is spelled in bytes


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
    sentences = lines_of(read_text(path))
    if not any(sentences):
        raise ValueError(f"{path} is empty; it must have one sentence per line")
    return sentences


def lines_of(text: str) -> list[str]:
    """The lines of a text, without the space around them."""
    # splitlines would also split at some Unicode characters, and the files would get out of step.
    lines = text.split("\n")
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]


class Subwords:
    """A sentencepiece model: byte pair encoding, with the 256 bytes for all other text.

    Text is normalised first (nmt_nfkc): "…" becomes "...". The ids 0, 1, 2 are PAD, SOS, EOS, as in
    `Vocabulary`.

    Args:
        model: the bytes of a sentencepiece model that `learned` made.

    Raises:
        ValueError: sentencepiece is not installed.

    Source: Sennrich et al. 2016; Kudo and Richardson 2018.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._processor = optional_package(
            "sentencepiece", "translation", extra="translate"
        ).SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)

    @classmethod
    def learned(cls, sentences: Iterable[str], size: int) -> Self:
        """Learns a model from text; the same text gives the same model.

        Args:
            sentences: the text.
            size: number of ids, the 256 bytes and 4 special ones included.

        Raises:
            ValueError: the text has fewer pieces than `size`, or more letters.
        """
        sentencepiece = optional_package("sentencepiece", "translation", extra="translate")
        written = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.Train(
                sentence_iterator=iter(sentences),
                model_writer=written,
                vocab_size=size,
                model_type="bpe",
                byte_fallback=True,
                pad_id=PAD,
                bos_id=SOS,
                eos_id=EOS,
                unk_id=UNKNOWN,
                pad_piece="PAD",
                bos_piece="SOS",
                eos_piece="EOS",
                minloglevel=2,  # errors only
            )
        except (RuntimeError, ValueError) as error:
            # The message names the failed check, "(...) [...] ", and then the possible sizes.
            reason = one_line(error).rpartition("] ")[2] or "there is none"
            raise ValueError(f"vocabulary_size must suit the text; {reason}; got {size}") from error
        return cls(written.getvalue())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence, without SOS or EOS."""
        rows: list[list[int]] = self._processor.EncodeAsIds(list(sentences))
        return rows

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """The text of each row up to its first EOS; PAD and SOS are left out."""
        ids = [[token for token in up_to_eos(row) if token not in (PAD, SOS, EOS)] for row in rows]
        texts: list[str] = self._processor.DecodeIds(ids) if ids else []  # DecodeIds([]) is ""
        return texts

    def label(self, token: int) -> str:
        """The label of an id in figures: the piece, with ▁ where a word begins."""
        return str(self._processor.IdToPiece(int(token)))
