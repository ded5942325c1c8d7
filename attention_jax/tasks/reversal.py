"""String reversal: "abc" becomes "cba"."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer
from attention_jax.nn import ANY_LENGTH, ModelConfig
from attention_jax.tasks.sequences import FIRST, Sequences, SequenceTask, TrainConfig

Array = jax.Array

# Trained on a few letters this model reverses strings of hundreds, with every score. The score
# under study is in its only attention. The query of letter i of the answer and the key of that
# letter have the same position id, since letter i of the answer is letter i from the source's end.
MODEL = ModelConfig(normalizer=None, encoder_layers=0, decoder_self_attention=False, **ANY_LENGTH)


@dataclasses.dataclass(frozen=True)
class Reversal(SequenceTask):
    """Reverse strings of random letters.

    Attributes:
        letters: how many letters strings use, from the start of the alphabet.
    """

    name: ClassVar[str] = "reversal"
    # Logits grow with the length of the source. Nine tokens are the longest source of training by
    # default, SOS included.
    normalizer: ClassVar[str] = "log_scaled(start=9)"

    model: ModelConfig = MODEL
    # Without decay a few queries in a thousand attend to a wrong letter among hundreds of keys.
    train: TrainConfig = TrainConfig(weight_decay=0.3)
    letters: int = 26

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("letters", self.letters, 1, len(self.vocabulary.alphabet))

    def pair(self, rng: Array, length: Array, *, longest: int) -> Sequences:
        letters = jax.random.randint(rng, (longest,), FIRST, FIRST + self.letters)
        return reversed_pair(letters, length)

    def pairs(self, rng: Array, lengths: Array, longest: int) -> Sequences:
        """Draws all letters of a batch at once, as the runs behind this project's results did."""
        shape = (len(lengths), longest)
        letters = jax.random.randint(rng, shape, FIRST, FIRST + self.letters)
        return jax.vmap(reversed_pair)(letters, lengths)

    def solution(self, text: str) -> str:
        return text[::-1]


def reversed_pair(letters: Array, length: Array) -> Sequences:
    """The first `length` of the letters, int32 [L], and their reversal."""
    mirrored = letters[jnp.maximum(length - 1 - jnp.arange(len(letters)), 0)]
    return (letters, length), (mirrored, length)
