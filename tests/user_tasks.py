"""A task outside of the project, as a user writes one; tests name it "user_tasks:Rotate"."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.tasks.sequences import FIRST, SequenceTask, Vocabulary


@dataclasses.dataclass(frozen=True)
class Rotate(SequenceTask):
    """Move the first letters of a string to its end.

    Attributes:
        by: how many letters.
    """

    name: ClassVar[str] = "rotate"
    vocabulary: ClassVar[Vocabulary] = Vocabulary("abcdef")
    by: int = 1

    def pair(self, rng, length, *, longest):
        letters = jax.random.randint(rng, (longest,), FIRST, self.vocabulary.size)
        return (letters, length), (letters[(jnp.arange(longest) + self.by) % length], length)

    def solution(self, text):
        by = self.by % len(text)
        return text[by:] + text[:by]
