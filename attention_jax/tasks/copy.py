"""Copying: "abc" becomes "abc"."""

import dataclasses
from typing import ClassVar

import jax

from attention_jax.nn import ModelConfig
from attention_jax.tasks.reversal import MODEL
from attention_jax.tasks.sequences import FIRST, Sequences, SequenceTask

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Copy(SequenceTask):
    """Copy strings of random letters."""

    name: ClassVar[str] = "copy"
    normalizer: ClassVar[str] = "log_scaled(start=9)"

    # Letter i of the answer is letter i from the source's start. SOS comes first in the decoder's
    # inputs and in the source, so that a query and its key have the same position id.
    model: ModelConfig = dataclasses.replace(MODEL, position_anchor="start")

    def pair(self, rng: Array, length: Array, *, longest: int) -> Sequences:
        letters = jax.random.randint(rng, (longest,), FIRST, self.vocabulary.size)
        return (letters, length), (letters, length)

    def solution(self, text: str) -> str:
        return text
