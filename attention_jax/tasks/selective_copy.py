"""Selective copying: "5 0 0 3 1 0 0" asks 5 and 3 at the last two blanks.

Source: Poli et al. 2024, "Mechanistic design and scaling of hybrid architectures" (MAD), section
3.1, after Gu and Dao 2023, "Mamba", section 3.1.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer
from attention_jax.tasks.tokens import TokenTask

Array = jax.Array
_COPY = 1


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(TokenTask):
    """Copy the letters among blanks.

    Letters are the tokens from 2 on. A sequence is: random letters with blanks, 0, each put before
    one of the letters at random; the token 1; and as many blanks as letters, at which the letters
    are asked in their order.

    Published: 14 letters, 16 of them copied, length 256, a model of 2 blocks with 128 features and
    16 heads: 99.8 %, trained on 12,800 sequences.

    Attributes:
        letters: how many different letters there are.
        copied: letters of a sequence.
    """

    name: ClassVar[str] = "selective_copy"

    letters: int = 14
    copied: int = 6

    def __post_init__(self) -> None:
        check_integer("letters", self.letters)
        super().__post_init__()
        check_integer("copied", self.copied, 1, (self.length - 1) // 2)

    @property
    def vocabulary_size(self) -> int:
        return 2 + self.letters

    @property
    def most_asked(self) -> int:
        return self.copied

    def tokens(self, rng: Array) -> Array:
        letter_rng, blank_rng = jax.random.split(rng)
        letters = jax.random.randint(letter_rng, (self.copied,), 2, self.vocabulary_size)
        order, start = jnp.arange(self.copied), self.length - self.copied - 1
        before = jax.random.randint(blank_rng, (start - self.copied,), 0, self.copied)
        places = order + jnp.sum(before[None, :] <= order[:, None], axis=1)
        tokens = jnp.zeros(self.length, jnp.int32)
        return tokens.at[places].set(letters).at[start].set(_COPY)

    def targets(self, tokens: Array) -> Array:
        start, index = jnp.argmax(tokens == _COPY), jnp.arange(len(tokens))
        is_letter = (tokens > _COPY) & (index < start)
        letters = tokens[jnp.argsort(~is_letter, stable=True)]  # letters come first
        asked = index - start - 1
        return jnp.where((asked >= 0) & (asked < jnp.sum(is_letter)), letters[asked], 0)
