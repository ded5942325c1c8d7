"""Letters to token ids and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PAD, SOS, EOS = 0, 1, 2  # padding, start of sequence, end of sequence
_SPECIALS = 3


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The ids 0, 1, 2 are PAD, SOS, EOS; the letters of `alphabet` follow in order.

    Attributes:
        alphabet: the letters, each once.

    >>> Vocabulary("abc").encode("cab")
    [5, 3, 4]
    >>> Vocabulary("abc").decode([5, 3, 4, 2, 0, 0])
    'cab'
    """

    alphabet: str = "abcdefghijklmnopqrstuvwxyz"

    def __post_init__(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet must be distinct letters; got {self.alphabet!r}")

    @property
    def size(self) -> int:
        """Number of ids, the three special ones included."""
        return _SPECIALS + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """One id per letter, without SOS or EOS."""
        for letter in text:
            if letter not in self.alphabet:
                raise ValueError(
                    f"text must consist of letters of {self.alphabet!r}; got {letter!r} in {text!r}"
                )
        return [_SPECIALS + self.alphabet.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The letters up to the first EOS; PAD and SOS are left out."""
        letters = []
        for token in map(int, ids):
            if token == EOS:
                break
            if token >= _SPECIALS:
                letters.append(self.alphabet[token - _SPECIALS])
        return "".join(letters)

    def label(self, token: int) -> str:
        """The label of a token in figures: the letter itself, or PAD, SOS, EOS."""
        special = {PAD: "PAD", SOS: "SOS", EOS: "EOS"}
        return special.get(token) or self.alphabet[token - _SPECIALS]
