"""Subwords: pieces of words, learned from text by sentencepiece; they can spell any text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from attention_jax.core.checks import check_integer
from attention_jax.tasks.vocabulary import EOS, PAD, SOS

UNKNOWN = 3  # never used: text outside the pieces is spelled in bytes


class Subwords:
    """A sentencepiece model: byte pair encoding, with the 256 bytes for all other text.

    Text is normalised first (nmt_nfkc): "…" becomes "...". The ids 0, 1, 2 are PAD, SOS, EOS, as in
    `Vocabulary`.

    Args:
        model: the bytes of a sentencepiece model.

    Raises:
        ValueError: they are not such a model, or its special ids differ, or sentencepiece is not
            installed.

    Source: Sennrich et al. 2016; Kudo and Richardson 2018.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._processor = _sentencepiece().SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"model must be a sentencepiece model; {error}") from error
        ids = (self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id())
        if ids != (PAD, SOS, EOS):
            raise ValueError(
                f"model must have the ids {(PAD, SOS, EOS)} for PAD, SOS and EOS; got {ids}"
            )

    @classmethod
    def learned(cls, sentences: Iterable[str], size: int) -> Subwords:
        """Learns a model from text; the same text gives the same model.

        Args:
            sentences: the text.
            size: number of ids, the 256 bytes and 4 special ones included.

        Raises:
            ValueError: the text has fewer pieces than `size`, or more letters.
        """
        check_integer("vocabulary_size", size)
        trainer, written = _sentencepiece().SentencePieceTrainer, io.BytesIO()
        try:
            trainer.Train(
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
            raise ValueError(_refusal(str(error), size)) from error
        return cls(written.getvalue())

    @property
    def size(self) -> int:
        """Number of ids."""
        return int(self._processor.GetPieceSize())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence, without SOS or EOS."""
        rows: list[list[int]] = self._processor.EncodeAsIds(list(sentences))
        return rows

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """The text of each row up to its first EOS; PAD and SOS are left out."""
        ids = [_text_ids(row) for row in rows]
        texts: list[str] = self._processor.DecodeIds(ids) if ids else []  # DecodeIds([]) is ""
        return texts

    def labels(self, ids: Sequence[int]) -> list[str]:
        """The label of each id in figures: the piece, with ▁ where a word begins."""
        return [str(self._processor.IdToPiece(int(token))) for token in ids]


def _text_ids(row: Sequence[int]) -> list[int]:
    ids = [int(token) for token in row]
    ids = ids[: ids.index(EOS)] if EOS in ids else ids
    return [token for token in ids if token not in (PAD, SOS)]


def _refusal(reason: str, size: int) -> str:
    """Our error message for an error of sentencepiece."""
    if largest := re.search(r"value <= (\d+)", reason):
        return (
            f"vocabulary_size must be at most {largest[1]}, the number of subwords in this text;"
            f" got {size}"
        )
    if smallest := re.search(r"smaller than required_chars\D*\d+ vs (\d+)", reason):
        return (
            f"vocabulary_size must be at least {smallest[1]}, for the letters of this text and 256"
            f" bytes; got {size}"
        )
    return f"vocabulary_size {size} cannot be learned from this text: {reason.strip()}"


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            "translation needs the package sentencepiece: .venv/bin/pip install -e '.[translate]'"
        ) from error
    return sentencepiece
